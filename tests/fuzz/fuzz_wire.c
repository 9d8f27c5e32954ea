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

#define FUZZ_NAME "fuzz_wire"
#define FUZZ_WORDS                                                                                 \
    "\"", "{", "}", "[", "]", "\\", "\\u", "0", "9", "null", "\"v\"", ", ", "\"dtype\"", ":", "-", \
        ".", "e", "\xc3", "\\ud83d", "\xff"
/* Keeps the length field true, so that more of the rest is looked at. */
#define FUZZ_EXTRA(input)                                                                          \
    do {                                                                                           \
        if ((input)->size >= 8) {                                                                  \
            uint64_t header = pick((input)->size);                                                 \
            memcpy((input)->data, &header, sizeof(header));                                        \
        }                                                                                          \
    } while (0)
#include "mutate.h"

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
