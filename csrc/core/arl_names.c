/* SPDX-License-Identifier: Apache-2.0 */
#include "core/arl_names.h"

#include "core/arl_hash.h"

#include <stdlib.h>
#include <string.h>

typedef struct arl_names_slot {
    const char *name; /* NULL: free */
    uint64_t hash;
    uint32_t length;
    uint32_t number;
} slot_t;

arl_status_t
arl_names_init(arl_names_t *names, uint32_t capacity, arl_error_t *err)
{
    uint64_t size = 8;

    while (size < (uint64_t)capacity * 2) { /* at most half full: probes stay short */
        size *= 2;
    }
    names->slots = calloc((size_t)size, sizeof(slot_t));
    if (names->slots == NULL) {
        return arl_error_set(err, ARL_ERR_NOMEM, "index names",
                             "out of memory for an index of %u names", capacity);
    }
    names->mask = (uint32_t)(size - 1);
    return ARL_OK;
}

/* The slot that holds the name, or the free one where it belongs. */
static slot_t *
names_slot(const arl_names_t *names, const char *name, uint32_t length, uint64_t hash)
{
    uint32_t at = (uint32_t)hash & names->mask;

    for (;; at = (at + 1) & names->mask) {
        slot_t *slot = &names->slots[at];

        if (slot->name == NULL || (slot->hash == hash && slot->length == length &&
                                   memcmp(slot->name, name, length) == 0)) {
            return slot;
        }
    }
}

uint32_t
arl_names_add(arl_names_t *names, const char *name, uint32_t length, uint32_t number)
{
    const uint64_t hash = arl_hash_bytes(0, name, length);
    slot_t *slot = names_slot(names, name, length, hash);

    if (slot->name == NULL) {
        *slot = (slot_t){name, hash, length, number};
    }
    return slot->number;
}

bool
arl_names_find(const arl_names_t *names, const char *name, uint32_t length, uint32_t *number_p)
{
    const slot_t *slot;

    if (names->slots == NULL) {
        return false;
    }
    slot = names_slot(names, name, length, arl_hash_bytes(0, name, length));
    if (slot->name == NULL) {
        return false;
    }
    *number_p = slot->number;
    return true;
}

void
arl_names_free(arl_names_t *names)
{
    free(names->slots);
    names->slots = NULL;
    names->mask = 0;
}
