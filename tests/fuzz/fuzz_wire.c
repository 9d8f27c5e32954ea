/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The plain C half of the wire format against any bytes: headers, trees, chunk metadata, JSON and
 * digests. With libFuzzer:
 *
 *   clang -g -O1 -fsanitize=fuzzer,address,undefined -std=c11 -D_GNU_SOURCE -Icsrc \
 *       tests/fuzz/fuzz_wire.c csrc/core/arl_{json,text,sha256,wire,wire_write,wire_chunk}.c \
 *       csrc/core/arl_{dtype,status,view}.c -o fuzz_wire && ./fuzz_wire CORPUS
 *
 * With -DARL_FUZZ_STANDALONE and any compiler: `fuzz_wire ROUNDS FILE...` mutates the files by
 * itself, the same way every time; tests/test_wire_fuzz.py runs that.
 */
#include "core/arl_json.h"
#include "core/arl_sha256.h"
#include "core/arl_wire.h"
#include "core/arl_wire_chunk.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

int LLVMFuzzerTestOneInput(const unsigned char *data, size_t size);

static void
require(int truth, const char *what)
{
    if (!truth) {
        (void)fprintf(stderr, "fuzz_wire: %s\n", what);
        abort();
    }
}

/* An error must be described, and a success must not be. */
static void
check_status(arl_status_t status, const arl_error_t *err)
{
    require(status == err->code, "the status and the error record disagree");
    require((status == ARL_OK) == (err->text[0] == '\0'), "an error without a text");
}

/* Reads tokens to the end, taking strings and numbers apart. */
static void
walk_json(arl_json_reader_t *reader)
{
    arl_json_token_t token;
    arl_error_t err = ARL_ERROR_INIT;
    arl_status_t status;

    do {
        status = arl_json_next(reader, &token, &err);
        check_status(status, &err);
        if (status != ARL_OK) {
            return;
        }
        require(token.begin <= token.end && token.end <= reader->size, "a token outside the text");
        if (token.kind == ARL_JSON_STRING || token.kind == ARL_JSON_KEY) {
            bool surrogates;
            size_t room = token.end - token.begin;
            char *plain = malloc(room + 1);
            size_t size = arl_json_unescape(reader, &token, plain, &surrogates);

            require(size <= room, "a string grew without its escapes");
            require(surrogates || arl_utf8_valid(plain, size), "a string that is not UTF-8");
            (void)arl_json_equals(reader, &token, "dtype");
            free(plain);
        }
        if (token.kind == ARL_JSON_INTEGER) {
            int64_t value;

            (void)arl_json_int64(reader, &token, &value);
        }
    } while (token.kind != ARL_JSON_END);
}

static void
try_json(const char *text, size_t size)
{
    if (arl_utf8_valid(text, size)) {
        for (int constants = 0; constants < 2; constants++) {
            arl_json_reader_t reader;

            arl_json_start(&reader, text, size, "text", constants != 0);
            walk_json(&reader);
        }
    }
}

/* What the writer makes of a string must read back as that string. */
static void
try_string(const char *utf8, size_t size)
{
    arl_text_t text = {0};
    arl_json_reader_t reader;
    arl_json_token_t token;
    bool surrogates;
    char *plain;

    if (!arl_utf8_valid(utf8, size)) {
        return;
    }
    arl_json_put_string(&text, utf8, size);
    arl_json_start(&reader, text.data, text.size, "text", false);
    require(arl_json_next(&reader, &token, NULL) == ARL_OK && token.kind == ARL_JSON_STRING,
            "a string that was written cannot be read");
    plain = malloc(token.end - token.begin + 1);
    require(arl_json_unescape(&reader, &token, plain, &surrogates) == size &&
                memcmp(plain, utf8, size) == 0,
            "a string changed on the way");
    free(plain);
    arl_text_free(&text);
}

/* The tensors of a sound header lie end to end inside the frame. */
static void
check_header(const arl_wire_header_t *header, size_t size)
{
    int64_t total = 0;

    for (int64_t i = 0; i < header->count; i++) {
        const arl_wire_tensor_t *tensor = &header->tensors[i];

        require(tensor->begin >= 0 && tensor->nbytes >= 0, "a negative place");
        require((uint64_t)tensor->begin + (uint64_t)tensor->nbytes <= size - header->data,
                "a tensor outside the frame");
        require(arl_wire_header_find(header, tensor->name, tensor->name_size) == tensor,
                "a tensor cannot be found by its name");
        total += tensor->nbytes;
    }
    require((uint64_t)total == size - header->data, "the tensors do not fill the frame");
}

static void
try_frame(const void *data, size_t size)
{
    arl_wire_header_t header = {0};
    arl_error_t err = ARL_ERROR_INIT;
    arl_status_t status = arl_wire_header_parse(data, size, &header, &err);
    arl_wire_tree_t tree;

    check_status(status, &err);
    if (status != ARL_OK) {
        require(header.tensors == NULL, "a header that failed was handed out");
        return;
    }
    check_header(&header, size);
    status = arl_wire_tree_open(&header, &tree, &err);
    check_status(status, &err);
    if (status == ARL_OK) {
        arl_json_reader_t json = tree.json;

        walk_json(&json);
    }
    arl_wire_header_free(&header);
}

static void
try_chunk(const void *data, size_t size)
{
    arl_wire_chunk_t chunk = {0};
    arl_error_t err = ARL_ERROR_INIT;
    arl_status_t status = arl_wire_chunk_parse(data, size, &chunk, &err);

    check_status(status, &err);
    if (status == ARL_OK) {
        status = arl_wire_chunks_check(&chunk, 1, &err);
        check_status(status, &err);
        if (status == ARL_OK) {
            require(chunk.payload_size == (uint64_t)chunk.frame_size, "a chunk of another size");
        }
    }
    arl_wire_chunk_free(&chunk);
}

/* Bytes cut into chunks join to the same bytes. */
static void
try_cut(const char *data, size_t size)
{
    arl_wire_chunk_t chunk = {.kind = ARL_WIRE_CHUNK_RESULT, .frame_size = (int64_t)size};
    arl_wire_chunk_t back = {0};
    arl_text_t frame = {0};

    if (size == 0) {
        return;
    }
    chunk.total = 1;
    arl_sha256_hex(data, size, chunk.sha256);
    require(arl_wire_chunk_write_header(&frame, &chunk, (int64_t)size, NULL) == ARL_OK,
            "a chunk cannot be written");
    arl_text_put(&frame, data, size);
    require(arl_wire_chunk_parse(frame.data, frame.size, &back, NULL) == ARL_OK &&
                arl_wire_chunks_check(&back, 1, NULL) == ARL_OK && back.payload_size == size &&
                memcmp(back.payload, data, size) == 0 &&
                memcmp(back.sha256, chunk.sha256, sizeof(back.sha256)) == 0,
            "a chunk changed on the way");
    arl_wire_chunk_free(&back);
    arl_text_free(&frame);
}

static void
try_digest(const void *data, size_t size)
{
    char fast[ARL_SHA256_HEX], slow[ARL_SHA256_HEX];
    unsigned char digest[ARL_SHA256_SIZE];
    arl_sha256_t sha;

    arl_sha256_hex(data, size, fast);
    arl_sha256_hex_portable(data, size, slow);
    require(memcmp(fast, slow, sizeof(fast)) == 0, "two digests of the same bytes");
    arl_sha256_start(&sha); /* in two parts, cut anywhere */
    arl_sha256_update(&sha, data, size / 3);
    arl_sha256_update(&sha, (const char *)data + size / 3, size - size / 3);
    arl_sha256_finish(&sha, digest);
    for (size_t i = 0; i < sizeof(digest); i++) {
        char hex[3];

        (void)snprintf(hex, sizeof(hex), "%02x", digest[i]);
        require(memcmp(hex, fast + 2 * i, 2) == 0, "a digest depends on how the bytes are cut");
    }
}

int
LLVMFuzzerTestOneInput(const unsigned char *data, size_t size)
{
    /* A copy of exactly that size, so that a sanitizer sees every byte read past it. */
    char *copy = malloc(size > 0 ? size : 1);

    memcpy(copy, data, size);
    try_frame(copy, size);
    try_chunk(copy, size);
    try_json(copy, size);
    try_string(copy, size);
    try_cut(copy, size);
    try_digest(copy, size);
    free(copy);
    return 0;
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
    static const char *const words[] = {"\"", "{", "}",    "[",     "]",      "\\",        "\\u",
                                        "0",  "9", "null", "\"v\"", ", ",     "\"dtype\"", ":",
                                        "-",  ".", "e",    "\xc3",  "\\ud83d", "\xff"};
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
    default: /* keep the length field true, so that more of the rest is looked at */
        if (input->size >= 8) {
            uint64_t header = pick(input->size);

            memcpy(input->data, &header, sizeof(header));
        }
    }
}

int
main(int argc, char **argv)
{
    const long rounds = argc > 2 ? atol(argv[1]) : 0;
    const size_t count = argc > 2 ? (size_t)argc - 2 : 0;
    input_t *inputs = calloc(count, sizeof(*inputs)), work = {malloc(ROOM), 0};

    require(rounds > 0 && inputs != NULL && work.data != NULL, "usage: fuzz_wire ROUNDS FILE...");
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
