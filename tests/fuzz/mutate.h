/* SPDX-License-Identifier: Apache-2.0 */
#ifndef ARL_FUZZ_MUTATE_H
#define ARL_FUZZ_MUTATE_H

/*
 * What the fuzz targets share: a check that aborts, and, with -DARL_FUZZ_STANDALONE, a main that
 * needs no libFuzzer. `TARGET ROUNDS FILE...` runs every file, then as many mutations of them, the
 * same ones every time. A target defines before including this:
 *
 *   FUZZ_NAME   its name, for messages
 *   FUZZ_WORDS  string literals that are put into inputs
 */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

int LLVMFuzzerTestOneInput(const unsigned char *data, size_t size);

static void
require(int truth, const char *what)
{
    if (!truth) {
        (void)fprintf(stderr, FUZZ_NAME ": %s\n", what);
        abort();
    }
}

#ifdef ARL_FUZZ_STANDALONE

static uint64_t state = 88172645463325252u;

static size_t
pick(size_t below)
{
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    return below == 0 ? 0 : (size_t)(state % below);
}

enum { ROOM = 1 << 20 };

typedef struct input {
    unsigned char *data;
    size_t size;
} input_t;

static input_t
read_file(const char *path)
{
    FILE *file = fopen(path, "rb");
    input_t input = {malloc(ROOM), 0};

    require(file != NULL && input.data != NULL, "cannot read a file");
    input.size = fread(input.data, 1, ROOM / 2, file);
    (void)fclose(file);
    return input;
}

/* One change in place; the room behind `input` allows it to grow. */
static void
mutate(input_t *input, const input_t *other)
{
    static const char *const words[] = {FUZZ_WORDS};
    const char *word = words[pick(sizeof(words) / sizeof(words[0]))];
    size_t at = pick(input->size), length;

    switch (pick(5)) {
    case 0:
        if (input->size > 0) {
            input->data[at] = (unsigned char)pick(256);
        }
        break;
    case 1:
        length = pick(16);
        length = length < input->size - at ? length : input->size - at;
        memmove(input->data + at, input->data + at + length, input->size - at - length);
        input->size -= length;
        break;
    case 2:
        length = strlen(word);
        memmove(input->data + at + length, input->data + at, input->size - at);
        memcpy(input->data + at, word, length);
        input->size += length;
        break;
    case 3:
        length = pick(64);
        length = length < other->size ? length : other->size;
        length = length < input->size - at ? length : input->size - at;
        memcpy(input->data + at, other->data + pick(other->size - length + 1), length);
        break;
    default:
#    ifdef FUZZ_EXTRA
        FUZZ_EXTRA(input);
#    endif
        break;
    }
}

int
main(int argc, char **argv)
{
    const long rounds = argc > 2 ? atol(argv[1]) : 0;
    const size_t count = argc > 2 ? (size_t)argc - 2 : 0;
    input_t *inputs = calloc(count, sizeof(*inputs)), work = {malloc(ROOM), 0};

    require(rounds > 0 && inputs != NULL && work.data != NULL, "usage: ROUNDS FILE...");
    for (size_t i = 0; i < count; i++) {
        inputs[i] = read_file(argv[2 + i]);
        (void)LLVMFuzzerTestOneInput(inputs[i].data, inputs[i].size);
    }
    for (long round = 0; round < rounds; round++) {
        const input_t *source = &inputs[pick(count)];

        memcpy(work.data, source->data, source->size);
        work.size = source->size;
        for (size_t changes = 1 + pick(4); changes > 0; changes--) {
            mutate(&work, &inputs[pick(count)]);
        }
        (void)LLVMFuzzerTestOneInput(work.data, work.size);
    }
    for (size_t i = 0; i < count; i++) {
        free(inputs[i].data);
    }
    free(inputs);
    free(work.data);
    (void)printf("%ld rounds over %zu files\n", rounds, count);
    return 0;
}

#endif
#endif
