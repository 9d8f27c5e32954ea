/* SPDX-License-Identifier: Apache-2.0 */
#include "transport/nccl.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static arl_status_t
nccl_probe(arl_error_t *err)
{
    const arl_nccl_api_t *api;

    return arl_nccl_load(&api, err);
}

/* ---- settings ------------------------------------------------------------------------------- */

/*
 * Variables that change what two ranks say to each other: which memory they share and how, over
 * what, with which protocol. Ranks that differ in one of these hang, or fail with an error that
 * names nothing. Those that concern one process only (NCCL_DEBUG, NCCL_SOCKET_IFNAME, …) are not
 * compared.
 */
static const char *const settings[] = {
    "NCCL_ALGO",
    "NCCL_BUFFSIZE",
    "NCCL_COLLNET_ENABLE",
    "NCCL_CROSS_NIC",
    "NCCL_CUMEM_ENABLE",
    "NCCL_CUMEM_HOST_ENABLE",
    "NCCL_IB_DISABLE",
    "NCCL_LL_BUFFSIZE",
    "NCCL_LL128_BUFFSIZE",
    "NCCL_MAX_CTAS",
    "NCCL_MAX_NCHANNELS",
    "NCCL_MIN_CTAS",
    "NCCL_MIN_NCHANNELS",
    "NCCL_NCHANNELS_PER_NET_PEER",
    "NCCL_NET",
    "NCCL_NTHREADS",
    "NCCL_NVLS_ENABLE",
    "NCCL_P2P_DIRECT_DISABLE",
    "NCCL_P2P_DISABLE",
    "NCCL_P2P_LEVEL",
    "NCCL_P2P_NET_CHUNKSIZE",
    "NCCL_P2P_NVL_CHUNKSIZE",
    "NCCL_PROTO",
    "NCCL_SHM_DISABLE",
    "NCCL_TOPO_FILE",
};

enum { SETTINGS = sizeof(settings) / sizeof(settings[0]), VALUE_MAX = 96 };

_Static_assert(SETTINGS *(VALUE_MAX + 32) < ARL_NCCL_SETTINGS_MAX, "all settings fit");

size_t
arl_nccl_settings_write(char text[ARL_NCCL_SETTINGS_MAX])
{
    size_t size = 0;

    text[0] = '\0';
    for (size_t i = 0; i < SETTINGS; i++) {
        const char *value = getenv(settings[i]);

        if (value != NULL) {
            size += (size_t)snprintf(text + size, ARL_NCCL_SETTINGS_MAX - size, "%s=%.*s\n",
                                     settings[i], VALUE_MAX, value);
        }
    }
    return size;
}

/* The value of a setting in a text of lines; NULL when it is not there. */
static const char *
find_setting(const char *text, size_t size, const char *name, size_t *length_p)
{
    const size_t length = strlen(name);
    const char *end = text + size;

    for (const char *line = text; line < end;) {
        const char *stop = memchr(line, '\n', (size_t)(end - line));

        if (stop == NULL) {
            break;
        }
        if ((size_t)(stop - line) > length && line[length] == '=' &&
            memcmp(line, name, length) == 0) {
            *length_p = (size_t)(stop - line) - length - 1;
            return line + length + 1;
        }
        line = stop + 1;
    }
    *length_p = 0;
    return NULL;
}

arl_status_t
arl_nccl_settings_compare(const char *theirs, size_t theirs_size, const char *operation,
                          const char *self, arl_error_t *err)
{
    char ours[ARL_NCCL_SETTINGS_MAX], list[ARL_ERROR_TEXT_MAX / 2];
    const size_t ours_size = arl_nccl_settings_write(ours);
    size_t used = 0;

    list[0] = '\0';
    for (size_t i = 0; i < SETTINGS; i++) {
        size_t a_size, b_size;
        const char *a = find_setting(theirs, theirs_size, settings[i], &a_size);
        const char *b = find_setting(ours, ours_size, settings[i], &b_size);

        if ((a == NULL) == (b == NULL) && a_size == b_size &&
            (a == NULL || memcmp(a, b, a_size) == 0)) {
            continue;
        }
        used += (size_t)snprintf(list + used, sizeof(list) - used,
                                 "%s%s is %.*s there and %.*s "
                                 "here",
                                 used > 0 ? ", " : "", settings[i],
                                 a == NULL ? 5 : (int)(a_size < VALUE_MAX ? a_size : VALUE_MAX),
                                 a == NULL ? "unset" : a, b == NULL ? 5 : (int)b_size,
                                 b == NULL ? "unset" : b);
        if (used >= sizeof(list)) {
            break;
        }
    }
    if (list[0] == '\0') {
        return ARL_OK;
    }
    return arl_error_set(err, ARL_ERR_UNAVAILABLE, operation,
                         "the offer's sender and %s run NCCL with different settings, which it "
                         "would not survive: %s; start both with the same ones",
                         self, list);
}

const arl_transport_t arl_transport_nccl = {
    .id = ARL_TRANSPORT_NCCL,
    .name = "nccl",
    .needs_gpu = true,
    .same_host = true,
    .streams = true,
    .connects = true,
    .probe = nccl_probe,
    .offer = arl_nccl_offer,
    .serve = arl_nccl_serve,
    .join = arl_nccl_join,
    .destroy = arl_nccl_destroy,
    .discard = arl_nccl_discard,
    .open = arl_nccl_pull_open,
    .copy = arl_nccl_pull_copy,
    .checksums = arl_nccl_pull_checksums,
    .close = arl_nccl_pull_close,
};
