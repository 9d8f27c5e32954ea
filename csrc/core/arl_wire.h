/* SPDX-License-Identifier: Apache-2.0 */
#ifndef ARL_CORE_WIRE_H
#define ARL_CORE_WIRE_H

#include "core/arl_json.h"
#include "core/arl_view.h"

/*
 * DSSST1 frames: the layout of the bytes, no objects. A frame is one safetensors file image:
 *
 *   0 .. 7        H, unsigned 64-bit little-endian: bytes of the header, padding included
 *   8 .. 8+H-1    UTF-8 JSON object, padded with spaces to a multiple of 8
 *   8+H ..        tensor data: contiguous, row-major, little-endian
 *
 * The header maps tensor names to dtype, shape and data_offsets, and "__metadata__" to
 * {"dss": JSON text of {"v": "DSSST1", "tree": NODE}, "op": JSON text, only when given}.
 */

#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#    error "the wire format is little-endian and is copied as it lies in memory"
#endif

enum {
    ARL_WIRE_LENGTH_SIZE = 8, /* the frame's first field */
    ARL_WIRE_ALIGNMENT = 8,
    ARL_WIRE_HEADER_MAX = 64 << 20,
};

#define ARL_WIRE_VERSION "DSSST1"
#define ARL_WIRE_METADATA_KEY "__metadata__"
#define ARL_WIRE_ROOT_KEY "__root__"
#define ARL_WIRE_EMPTY_KEY "__dss_empty__"

/* The order of names in the format: by bytes, a prefix first. */
int arl_wire_compare_names(const char *a, size_t a_size, const char *b, size_t b_size);

/* ---- reading ------------------------------------------------------------------------------- */

typedef struct arl_wire_tensor {
    const char *name; /* UTF-8, not terminated; lives as long as the header */
    size_t name_size;
    arl_dtype_t dtype;
    int ndim;
    int64_t shape[ARL_VIEW_DIMS_MAX];
    int64_t begin; /* bytes from the start of the data */
    int64_t nbytes;
} arl_wire_tensor_t;

typedef struct arl_wire_header {
    arl_wire_tensor_t *tensors; /* sorted by name */
    int64_t count;
    const char *dss; /* NULL when the frame has none */
    size_t dss_size;
    const char *op; /* NULL when the frame has none */
    size_t op_size;
    size_t data;   /* offset of the data in the frame */
    char *strings; /* what the pointers above point into */
} arl_wire_header_t;

/*
 * Reads and checks a header against the size of the whole frame: names unique, offsets from 0
 * on, contiguous, without holes or overlaps, ending with the frame, each tensor's bytes equal
 * to its elements times their size. ARL_ERR_WIRE says which rule is broken and where.
 */
arl_status_t arl_wire_header_parse(const void *frame, size_t size, arl_wire_header_t *header_p,
                                   arl_error_t *err);
void arl_wire_header_free(arl_wire_header_t *header);

/* The tensor of that name, or NULL. */
const arl_wire_tensor_t *arl_wire_header_find(const arl_wire_header_t *header, const char *name,
                                              size_t size);

/* A reader over `dss` that stands before the tree, the version checked. */
typedef struct arl_wire_tree {
    arl_json_reader_t json;
    bool version_read_after; /* the version comes after the tree in the text */
} arl_wire_tree_t;

arl_status_t arl_wire_tree_open(const arl_wire_header_t *header, arl_wire_tree_t *tree_p,
                                arl_error_t *err);

/* To be called with the tree read: checks what follows it. */
arl_status_t arl_wire_tree_close(arl_wire_tree_t *tree, arl_error_t *err);

/* ---- writing ------------------------------------------------------------------------------- */

typedef struct arl_wire_item {
    const char *name; /* UTF-8, not terminated */
    size_t name_size;
    const char *path; /* where the tensor is in the object, for messages; terminated */
    bool scalar;      /* 0-d: stored with shape [1] */
    arl_view_t view;
    int64_t begin;  /* filled by arl_wire_layout: bytes from the start of the data */
    int64_t nbytes; /* likewise */
} arl_wire_item_t;

/*
 * Puts the items into the order of the format (descending dtype rank, then name) and gives each
 * its place. ARL_ERR_WIRE when a dtype has no name in the format, two items have one name, or
 * the sizes overflow.
 */
arl_status_t arl_wire_layout(arl_wire_item_t *items, int64_t count, int64_t *data_size_p,
                             arl_error_t *err);

/* The first fields of the frame, length and padding included. `op` may be NULL. */
arl_status_t arl_wire_write_header(arl_text_t *out, const arl_wire_item_t *items, int64_t count,
                                   const char *dss, size_t dss_size, const char *op, size_t op_size,
                                   arl_error_t *err);

#endif
