/* SPDX-License-Identifier: Apache-2.0 */
#include "core/arl_hash.h"
#include "core/arl_offer_layout.h"

#include <stdlib.h>
#include <string.h>

static const char WRITE[] = "make offer";

static wire_unit_t
unit_to_wire(const arl_unit_t *unit)
{
    wire_unit_t wire = {.kind = (uint32_t)unit->kind, .index = unit->index};

    memcpy(wire.uuid, unit->uuid, sizeof(wire.uuid));
    return wire;
}

static void
write_header(const arl_offer_t *offer, size_t total, uint32_t names_size, uint8_t *out)
{
    wire_header_t wire = {
        .format = ARL_OFFER_FORMAT,
        .total_size = total,
        .header_size = sizeof(wire_header_t),
        .transport = offer->transport,
        .verify = (uint32_t)offer->verify,
        .receivers = offer->receivers,
        .senders = offer->senders,
        .sender_rank = offer->sender_rank,
        .pid_namespace = offer->sender.pid_namespace,
        .pid = offer->sender.pid,
        .start_time = offer->sender.start_time,
        .unit = unit_to_wire(&offer->unit),
        .epoch = offer->epoch,
        .layout_id = offer->layout_id,
        .alloc_count = offer->alloc_count,
        .tensor_count = offer->tensor_count,
        .names_size = names_size,
        .blob_size = offer->blob_size,
    };

    memcpy(wire.magic, OFFER_MAGIC, sizeof(wire.magic));
    memcpy(wire.boot_id, offer->sender.boot_id, sizeof(wire.boot_id));
    memcpy(wire.host, offer->host, sizeof(wire.host));
    memcpy(wire.control, offer->control, sizeof(wire.control));
    memcpy(wire.fallback, offer->fallback, sizeof(wire.fallback));
    memcpy(wire.nonce, offer->nonce, sizeof(wire.nonce));
    memcpy(out, &wire, sizeof(wire));
}

static uint8_t *
write_allocs(const arl_offer_t *offer, uint8_t *out)
{
    for (uint32_t i = 0; i < offer->alloc_count; i++, out += sizeof(wire_alloc_t)) {
        const arl_offer_alloc_t *alloc = &offer->allocs[i];
        wire_alloc_t wire = {
            .kind = (uint32_t)alloc->kind,
            .size = alloc->size,
            .base_id = alloc->base_id,
            .unit = unit_to_wire(&alloc->unit),
        };

        memcpy(wire.handle, alloc->handle, sizeof(wire.handle));
        memcpy(out, &wire, sizeof(wire));
    }
    return out;
}

static uint8_t *
write_tensors(const arl_offer_t *offer, uint8_t *out)
{
    for (uint32_t i = 0; i < offer->tensor_count; i++, out += sizeof(wire_tensor_t)) {
        const arl_offer_tensor_t *tensor = &offer->tensors[i];
        wire_tensor_t wire = {
            .name_length = tensor->name_length,
            .dtype = (uint32_t)tensor->dtype,
            .ndim = (uint32_t)tensor->ndim,
            .alloc = tensor->alloc,
            .alias_of = tensor->alias_of,
            .offset = tensor->offset,
        };
        const size_t size = (size_t)tensor->ndim * sizeof(wire.shape[0]);

        memcpy(wire.shape, tensor->shape, size);
        memcpy(wire.strides, tensor->strides, size);
        memcpy(out, &wire, sizeof(wire));
    }
    return out;
}

static arl_status_t
check_limits(const arl_offer_t *offer, arl_error_t *err)
{
    if (offer->tensor_count > ARL_OFFER_TENSORS_MAX) {
        return arl_error_set(err, ARL_ERR_VALUE, WRITE, "%u tensors, at most %d are supported",
                             offer->tensor_count, (int)ARL_OFFER_TENSORS_MAX);
    }
    if (offer->alloc_count > ARL_OFFER_ALLOCS_MAX) {
        return arl_error_set(err, ARL_ERR_VALUE, WRITE, "%u allocations, at most %d are supported",
                             offer->alloc_count, (int)ARL_OFFER_ALLOCS_MAX);
    }
    if (offer->blob_size > ARL_OFFER_BLOB_MAX) {
        return arl_error_set(err, ARL_ERR_VALUE, WRITE, "%u bytes of transport data, at most %d",
                             offer->blob_size, (int)ARL_OFFER_BLOB_MAX);
    }
    for (uint32_t i = 0; i < offer->tensor_count; i++) {
        if (offer->tensors[i].name_length > ARL_OFFER_NAME_MAX) {
            return arl_error_set(err, ARL_ERR_VALUE, WRITE,
                                 "tensor %u has a name of %u bytes, at most %d are supported: "
                                 "%.60s…",
                                 i, offer->tensors[i].name_length, (int)ARL_OFFER_NAME_MAX,
                                 offer->tensors[i].name);
        }
    }
    return ARL_OK;
}

arl_status_t
arl_offer_encode(const arl_offer_t *offer, uint8_t **bytes_p, size_t *size_p, arl_error_t *err)
{
    uint32_t names_size = 0, crc;
    size_t total;
    uint8_t *bytes, *at;
    arl_status_t status = check_limits(offer, err);

    if (status != ARL_OK) {
        return status;
    }
    for (uint32_t i = 0; i < offer->tensor_count; i++) {
        names_size += offer->tensors[i].name_length; /* < 2^30, by the limits */
    }
    total = sizeof(wire_header_t) + offer->alloc_count * sizeof(wire_alloc_t) +
            offer->tensor_count * sizeof(wire_tensor_t) +
            checksums_size(offer->verify, offer->tensor_count) + names_size + offer->blob_size;
    bytes = malloc(total);
    if (bytes == NULL) {
        return arl_error_set(err, ARL_ERR_NOMEM, WRITE, "out of memory for %zu bytes", total);
    }
    write_header(offer, total, names_size, bytes);
    at = write_allocs(offer, bytes + sizeof(wire_header_t));
    at = write_tensors(offer, at);
    for (uint32_t i = 0; offer->verify != ARL_VERIFY_NONE && i < offer->tensor_count; i++) {
        memcpy(at, &offer->tensors[i].checksum, sizeof(uint64_t));
        at += sizeof(uint64_t);
    }
    for (uint32_t i = 0; i < offer->tensor_count; i++) {
        memcpy(at, offer->tensors[i].name, offer->tensors[i].name_length);
        at += offer->tensors[i].name_length;
    }
    if (offer->blob_size > 0) {
        memcpy(at, offer->blob, offer->blob_size);
    }
    crc = arl_crc32c(0, bytes, total);
    memcpy(bytes + offsetof(wire_header_t, crc), &crc, sizeof(crc));
    *bytes_p = bytes;
    *size_p = total;
    return ARL_OK;
}
