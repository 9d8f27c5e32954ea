/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The reader of offers, and the plan made from one, against any bytes. What is accepted must
 * hold all that arl_offer.h promises: no copy of the plan may leave its allocation. With
 * libFuzzer:
 *
 *   clang -g -O1 -fsanitize=fuzzer,address,undefined -std=c11 -D_GNU_SOURCE -Icsrc -pthread \
 *       tests/fuzz/fuzz_offer.c csrc/core/arl_{offer,names,hash,binding,overlap,plan}.c \
 *       csrc/core/arl_{dtype,status,threads,view}.c -o fuzz_offer && ./fuzz_offer CORPUS
 *
 * With -DARL_FUZZ_STANDALONE and any compiler: `fuzz_offer ROUNDS FILE...` mutates the files by
 * itself, the same way every time; tests/test_offer_fuzz.py runs that.
 */
#include "core/arl_binding.h"
#include "core/arl_hash.h"
#include "core/arl_offer.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

int LLVMFuzzerTestOneInput(const unsigned char *data, size_t size);

static long accepted, planned;

static void
require(int truth, const char *what)
{
    if (!truth) {
        (void)fprintf(stderr, "fuzz_offer: %s\n", what);
        abort();
    }
}

static void
check_status(arl_status_t status, const arl_error_t *err)
{
    require(status == err->code, "the status and the error record disagree");
    require((status == ARL_OK) == (err->text[0] == '\0'), "an error without a text");
}

/* Magic, size and checksum made right: what a fuzzer would hardly find by itself. */
static void
sign(unsigned char *bytes, size_t size)
{
    const uint64_t total = size;
    uint32_t crc = 0;

    if (size < 24) {
        return;
    }
    memcpy(bytes, "ARLOFFER", 8);
    memcpy(bytes + 12, &crc, sizeof(crc));
    memcpy(bytes + 16, &total, sizeof(total));
    crc = arl_crc32c(0, bytes, size);
    memcpy(bytes + 12, &crc, sizeof(crc));
}

/* Every byte that a copy reads lies in its allocation. */
static void
check_copy(const arl_offer_t *offer, const arl_copy_t *copy)
{
    int64_t low = copy->src_offset, high = copy->src_offset + copy->run_bytes;

    for (int i = 0; i < copy->ndim; i++) {
        const int64_t reach = (copy->count[i] - 1) * copy->src_stride[i];

        require(copy->count[i] > 1 && copy->run_bytes > 0, "a copy of nothing");
        *(reach < 0 ? &low : &high) += reach;
    }
    if (copy->alloc != ARL_OFFER_STREAMED) {
        require(copy->alloc < offer->alloc_count, "a copy from nowhere");
        require(low >= 0 && (uint64_t)high <= offer->allocs[copy->alloc].size,
                "a copy leaves its allocation");
    }
}

/* A receiver that wants just what is offered, at addresses that are never used. */
static void
check_plan(const arl_offer_t *offer)
{
    arl_binding_t *bindings = calloc((size_t)offer->tensor_count + 1, sizeof(*bindings));
    arl_binding_set_t set = {.bindings = bindings, .count = offer->tensor_count};
    arl_error_t err = ARL_ERROR_INIT;
    arl_plan_report_t report;
    arl_plan_t plan;
    arl_status_t status;

    require(bindings != NULL, "out of memory");
    for (uint32_t i = 0; i < offer->tensor_count; i++) {
        arl_view_t view = arl_offer_tensor_view(offer, i, NULL);
        int64_t stride = (int64_t)view.itemsize;

        view.data = (void *)(uintptr_t)(((uint64_t)i + 1) << 40);
        for (int d = view.ndim - 1; d >= 0; d--) {
            view.strides[d] = stride;
            stride *= view.shape[d] > 0 ? view.shape[d] : 1; /* fits: arl_view_nbytes did */
        }
        bindings[i] = (arl_binding_t){
            offer->tensors[i].name, offer->tensors[i].name_length, false, view, -1, 0, 0};
    }
    status = arl_binding_set_init(&set, &err);
    check_status(status, &err);
    if (status == ARL_OK) {
        status = arl_plan_build(offer, &set, "fuzz", &plan, &report, &err);
        check_status(status, &err);
        if (status == ARL_OK) {
            planned++;
            for (int64_t i = 0; i < plan.count; i++) {
                check_copy(offer, &plan.copies[i]);
            }
            arl_plan_free(&plan);
        }
        arl_binding_set_free(&set);
    }
    free(bindings);
}

/* Written again, an offer is the same bytes. */
static void
check_encoding(const arl_offer_t *offer, const unsigned char *data, size_t size)
{
    arl_error_t err = ARL_ERROR_INIT;
    uint8_t *bytes;
    size_t again;

    require(arl_offer_encode(offer, &bytes, &again, &err) == ARL_OK, "it cannot be written again");
    require(again == size && memcmp(bytes, data, size) == 0, "it was written differently");
    free(bytes);
}

/* The last offer that was valid; a receiver has one too, and reads the next in its light. */
static arl_offer_t known;

/* What is known beforehand saves work, and changes nothing. */
static void
check_known(arl_status_t wanted, const unsigned char *data, size_t size)
{
    arl_error_t err = ARL_ERROR_INIT;
    arl_offer_t offer;

    if (known.storage == NULL) {
        return;
    }
    require(arl_offer_decode(data, size, &known, &offer, &err) == wanted,
            "an offer known before gives another verdict");
    if (wanted == ARL_OK) {
        check_encoding(&offer, data, size);
        arl_offer_free(&offer);
    }
}

static void
check_bytes(const unsigned char *data, size_t size)
{
    arl_error_t err = ARL_ERROR_INIT;
    arl_offer_t offer;
    const arl_status_t status = arl_offer_decode(data, size, NULL, &offer, &err);

    check_status(status, &err);
    check_known(status, data, size);
    if (status == ARL_OK) {
        accepted++;
        check_encoding(&offer, data, size);
        check_plan(&offer);
        arl_offer_free(&known);
        known = offer;
        check_known(status, data, size);
    }
}

int
LLVMFuzzerTestOneInput(const unsigned char *data, size_t size)
{
    unsigned char *bytes = malloc(size + 1); /* of its exact size, for the sanitizer */

    require(bytes != NULL, "out of memory");
    memcpy(bytes, data, size);
    check_bytes(bytes, size);
    sign(bytes, size);
    check_bytes(bytes, size);
    free(bytes);
    return 0;
}

#ifdef ARL_FUZZ_STANDALONE

enum { ROOM = 1 << 16 };

static uint64_t random_state = 1;

static uint64_t
draw(uint64_t limit)
{
    random_state = arl_hash_mix(random_state + UINT64_C(0x9e3779b97f4a7c15));
    return limit == 0 ? 0 : random_state % limit;
}

/* Numbers at the edges, of any width, where numbers of the offer may be; or another size. */
static size_t
mutate(unsigned char *bytes, size_t size)
{
    static const int64_t edges[] = {0, 1, 2, 8, 255, INT32_MAX, INT64_MAX, -1, -2, INT64_MIN};
    const size_t width = (size_t)1 << draw(4);
    const int64_t value = draw(2) ? edges[draw(sizeof(edges) / sizeof(edges[0]))]
                                  : (int64_t)draw(draw(2) ? 300 : UINT64_MAX);

    if (draw(16) == 0) {
        const size_t other = draw(2) ? draw(size + 1) : size + draw(32);

        if (other > size) {
            memset(bytes + size, (int)draw(256), other - size);
        }
        return other;
    }
    if (size >= width) {
        memcpy(bytes + draw(size / width) * width, &value, width);
    }
    return size;
}

int
main(int argc, char **argv)
{
    const long rounds = argc > 2 ? atol(argv[1]) : 0;
    static unsigned char seed[ROOM], bytes[ROOM];

    require(rounds > 0, "usage: fuzz_offer ROUNDS FILE...");
    for (int i = 2; i < argc; i++) {
        FILE *file = fopen(argv[i], "rb");
        long accepted_before;
        size_t size;

        require(file != NULL, "cannot read a file");
        size = fread(seed, 1, ROOM / 2, file);
        (void)fclose(file);
        accepted_before = accepted;
        (void)LLVMFuzzerTestOneInput(seed, size);
        require(accepted == accepted_before + 2, "a good offer was refused");
        for (long round = 0; round < rounds / (argc - 2); round++) {
            size_t length = size;

            memcpy(bytes, seed, size);
            for (uint64_t changes = 1 + draw(4); changes > 0; changes--) {
                length = mutate(bytes, length);
            }
            (void)LLVMFuzzerTestOneInput(bytes, length);
        }
    }
    (void)printf("%ld rounds, %ld offers accepted, %ld plans made\n", rounds, accepted, planned);
    return 0;
}

#endif
