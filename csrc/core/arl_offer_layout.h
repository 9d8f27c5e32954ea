/* SPDX-License-Identifier: Apache-2.0 */
#ifndef ARL_CORE_OFFER_LAYOUT_H
#define ARL_CORE_OFFER_LAYOUT_H

#include "core/arl_offer.h"

/*
 * The bytes of an offer: header, allocations, tensors, checksums (if any), names, blob. Only for
 * the two files that write and read them.
 */

#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#    error "offers are little-endian and copied as they are; this host is not little-endian"
#endif

#define OFFER_MAGIC "ARLOFFER" /* eight bytes, without an end */

typedef struct wire_unit {
    uint32_t kind;
    int32_t index;
    uint8_t uuid[ARL_OFFER_ID_BYTES];
} wire_unit_t;

typedef struct wire_header {
    char magic[8];
    uint32_t format;
    uint32_t crc; /* of all bytes, with this field 0 */
    uint64_t total_size;
    uint32_t header_size;
    uint32_t transport;
    uint32_t verify;
    uint32_t receivers;
    uint32_t senders;
    uint32_t sender_rank;
    uint8_t boot_id[ARL_OFFER_ID_BYTES];
    uint64_t pid_namespace;
    int64_t pid;
    uint64_t start_time;
    wire_unit_t unit;
    char host[ARL_OFFER_HOST_MAX];
    char control[ARL_OFFER_HOST_MAX];
    char fallback[ARL_OFFER_REASON_MAX];
    uint8_t nonce[ARL_OFFER_ID_BYTES];
    uint64_t epoch;
    uint64_t layout_id;
    uint32_t alloc_count;
    uint32_t tensor_count;
    uint32_t names_size;
    uint32_t blob_size;
} wire_header_t;

typedef struct wire_alloc {
    uint32_t kind;
    uint32_t reserved; /* 0 */
    uint64_t size;
    uint64_t base_id;
    wire_unit_t unit;
    uint8_t handle[ARL_OFFER_HANDLE_BYTES];
} wire_alloc_t;

typedef struct wire_tensor {
    uint32_t name_length; /* names follow each other without gaps */
    uint32_t dtype;
    uint32_t ndim;
    uint32_t alloc;
    uint32_t alias_of;
    uint32_t reserved; /* 0 */
    uint64_t offset;
    int64_t shape[ARL_VIEW_DIMS_MAX];   /* 0 beyond ndim */
    int64_t strides[ARL_VIEW_DIMS_MAX]; /* 0 beyond ndim */
} wire_tensor_t;

_Static_assert(sizeof(wire_unit_t) == 24, "offer layout");
_Static_assert(sizeof(wire_header_t) == 416, "offer layout");
_Static_assert(offsetof(wire_header_t, boot_id) == 48, "offer layout");
_Static_assert(offsetof(wire_header_t, nonce) == 368, "offer layout");
_Static_assert(sizeof(wire_alloc_t) == 112, "offer layout");
_Static_assert(sizeof(wire_tensor_t) == 160, "offer layout");

static inline size_t
checksums_size(arl_verify_t verify, uint32_t tensor_count)
{
    return verify == ARL_VERIFY_NONE ? 0 : (size_t)tensor_count * sizeof(uint64_t);
}

#endif
