/* SPDX-License-Identifier: Apache-2.0 */
#include "core/arl_offer.h"

#include "core/arl_hash.h"
#include "core/arl_names.h"
#include "core/arl_offer_layout.h"

#include <stdlib.h>
#include <string.h>

static const char READ[] = "read offer";

/* ---- small things ---------------------------------------------------------------------------- */

uint64_t
arl_offer_layout_id(const arl_offer_t *offer)
{
    uint64_t id =
        arl_hash_bytes(ARL_OFFER_FORMAT, &offer->tensor_count, sizeof(offer->tensor_count));

    for (uint32_t i = 0; i < offer->tensor_count; i++) {
        const arl_offer_tensor_t *tensor = &offer->tensors[i];
        const uint32_t head[2] = {(uint32_t)tensor->dtype, (uint32_t)tensor->ndim};

        id = arl_hash_bytes(id, tensor->name, tensor->name_length);
        id = arl_hash_bytes(id, head, sizeof(head));
        id = arl_hash_bytes(id, tensor->shape, (size_t)tensor->ndim * sizeof(tensor->shape[0]));
    }
    return id;
}

bool
arl_offer_sampled(const arl_offer_t *offer, uint32_t index)
{
    /* Few tensors: with a step of 16 most epochs would check none. */
    const uint64_t step = offer->tensor_count < 16 ? offer->tensor_count : 16;

    return step != 0 && index % step == offer->epoch % step;
}

bool
arl_offer_has_checksum(const arl_offer_t *offer, uint32_t index)
{
    return offer->verify == ARL_VERIFY_ALL ||
           (offer->verify == ARL_VERIFY_SAMPLE && arl_offer_sampled(offer, index));
}

bool
arl_offer_same_layout(const arl_offer_t *a, const arl_offer_t *b)
{
    if (a->layout_id != b->layout_id || a->tensor_count != b->tensor_count ||
        a->alloc_count != b->alloc_count) {
        return false;
    }
    for (uint32_t i = 0; i < a->tensor_count; i++) {
        const arl_offer_tensor_t *x = &a->tensors[i], *y = &b->tensors[i];

        if (x->alloc != y->alloc || x->offset != y->offset || x->alias_of != y->alias_of ||
            x->dtype != y->dtype || x->ndim != y->ndim || x->name_length != y->name_length ||
            memcmp(x->name, y->name, x->name_length) != 0 ||
            memcmp(x->shape, y->shape, sizeof(x->shape)) != 0 ||
            memcmp(x->strides, y->strides, sizeof(x->strides)) != 0) {
            return false;
        }
    }
    return true;
}

arl_view_t
arl_offer_tensor_view(const arl_offer_t *offer, uint32_t index, const void *base)
{
    const arl_offer_tensor_t *tensor = &offer->tensors[index];
    arl_view_t view = {
        .data = (char *)base + tensor->offset,
        .dtype = tensor->dtype,
        .itemsize = arl_dtype_size(tensor->dtype),
        .ndim = tensor->ndim,
        .readonly = true,
    };

    memcpy(view.shape, tensor->shape, sizeof(view.shape));
    memcpy(view.strides, tensor->strides, sizeof(view.strides));
    return view;
}

/* ---- reading --------------------------------------------------------------------------------- */

static arl_status_t
read_frame(const uint8_t *bytes, size_t size, wire_header_t *wire_p, arl_error_t *err)
{
    const uint32_t zero = 0;
    const size_t crc_at = offsetof(wire_header_t, crc), crc_end = crc_at + sizeof(zero);
    wire_header_t wire;
    uint32_t crc;

    if (size < sizeof(wire.magic) || memcmp(bytes, OFFER_MAGIC, sizeof(wire.magic)) != 0) {
        return arl_error_set(err, ARL_ERR_SYNC, READ,
                             "these %zu bytes are not an offer: they do not begin with "
                             "\"ARLOFFER\"; pass what WeightSender.offer() returned, unchanged",
                             size);
    }
    if (size < sizeof(wire)) {
        return arl_error_set(err, ARL_ERR_SYNC, READ,
                             "offer was cut off: %zu bytes arrived, its header alone has %zu", size,
                             sizeof(wire));
    }
    memcpy(&wire, bytes, sizeof(wire));
    if (wire.format != ARL_OFFER_FORMAT) {
        return arl_error_set(err, ARL_ERR_SYNC, READ,
                             "offer has format %u, this side reads format %d: install the same "
                             "version of arctic_rl_c for trainer and sampler",
                             wire.format, (int)ARL_OFFER_FORMAT);
    }
    if (wire.total_size != size || wire.header_size != sizeof(wire)) {
        return arl_error_set(err, ARL_ERR_SYNC, READ,
                             "offer says it has %llu bytes (header %u), but %zu arrived (header "
                             "%zu): it was cut off or something was added on the way",
                             (unsigned long long)wire.total_size, wire.header_size, size,
                             sizeof(wire));
    }
    crc = arl_crc32c(0, bytes, crc_at);
    crc = arl_crc32c(crc, &zero, sizeof(zero));
    crc = arl_crc32c(crc, bytes + crc_end, size - crc_end);
    if (crc != wire.crc) {
        return arl_error_set(err, ARL_ERR_SYNC, READ,
                             "offer is corrupt: its CRC-32C is %08x and should be %08x", crc,
                             wire.crc);
    }
    *wire_p = wire;
    return ARL_OK;
}

static arl_status_t
invalid(arl_error_t *err, const char *what, uint64_t found, uint64_t limit)
{
    return arl_error_set(err, ARL_ERR_SYNC, READ,
                         "offer is not valid: %s is %llu, the limit is %llu", what,
                         (unsigned long long)found, (unsigned long long)limit);
}

static bool
terminated(const char *text, size_t size)
{
    return memchr(text, 0, size) != NULL;
}

/* Checks the counts and that the sections fill the rest exactly. */
static arl_status_t
check_header(const wire_header_t *wire, arl_error_t *err)
{
    uint64_t rest = wire->total_size - sizeof(*wire); /* total_size == size >= header */
    uint64_t need;

    if (wire->alloc_count > ARL_OFFER_ALLOCS_MAX) {
        return invalid(err, "number of allocations", wire->alloc_count, ARL_OFFER_ALLOCS_MAX);
    }
    if (wire->tensor_count > ARL_OFFER_TENSORS_MAX) {
        return invalid(err, "number of tensors", wire->tensor_count, ARL_OFFER_TENSORS_MAX);
    }
    if (wire->blob_size > ARL_OFFER_BLOB_MAX) {
        return invalid(err, "size of the transport's data", wire->blob_size, ARL_OFFER_BLOB_MAX);
    }
    if (wire->verify >= ARL_VERIFY_END) {
        return invalid(err, "checksum mode", wire->verify, ARL_VERIFY_END - 1);
    }
    if (wire->receivers - 1 >= ARL_OFFER_RECEIVERS_MAX) { /* 0 wraps */
        return invalid(err, "number of receivers", wire->receivers, ARL_OFFER_RECEIVERS_MAX);
    }
    if (wire->sender_rank >= wire->senders) {
        return invalid(err, "sender's rank", wire->sender_rank, wire->senders);
    }
    if (wire->senders > ARL_OFFER_SENDERS_MAX) {
        return invalid(err, "number of senders", wire->senders, ARL_OFFER_SENDERS_MAX);
    }
    if (wire->unit.kind > ARL_UNIT_MIG) {
        return invalid(err, "kind of device", wire->unit.kind, ARL_UNIT_MIG);
    }
    if (wire->pid <= 0) {
        return arl_error_set(err, ARL_ERR_SYNC, READ, "offer is not valid: pid %lld",
                             (long long)wire->pid);
    }
    if (!terminated(wire->host, sizeof(wire->host)) ||
        !terminated(wire->control, sizeof(wire->control)) ||
        !terminated(wire->fallback, sizeof(wire->fallback))) {
        return arl_error_set(err, ARL_ERR_SYNC, READ,
                             "offer is not valid: a text of its header has no end");
    }
    /* All counts are below 2^20 and all sizes below 2^32: this sum cannot wrap. */
    need = wire->alloc_count * (uint64_t)sizeof(wire_alloc_t) +
           wire->tensor_count * (uint64_t)sizeof(wire_tensor_t) +
           checksums_size((arl_verify_t)wire->verify, wire->tensor_count) + wire->names_size +
           wire->blob_size;
    if (need != rest) {
        return arl_error_set(err, ARL_ERR_SYNC, READ,
                             "offer is not valid: %u allocations, %u tensors, %u bytes of names "
                             "and %u bytes of transport data need %llu bytes, there are %llu",
                             wire->alloc_count, wire->tensor_count, wire->names_size,
                             wire->blob_size, (unsigned long long)need, (unsigned long long)rest);
    }
    return ARL_OK;
}

static void
unit_from_wire(const wire_unit_t *wire, arl_unit_t *unit_p)
{
    unit_p->kind = (arl_unit_kind_t)wire->kind;
    unit_p->index = wire->index;
    memcpy(unit_p->uuid, wire->uuid, sizeof(unit_p->uuid));
}

static arl_status_t
read_alloc(const uint8_t *bytes, uint32_t index, arl_offer_alloc_t *alloc_p, arl_error_t *err)
{
    wire_alloc_t wire;

    memcpy(&wire, bytes, sizeof(wire));
    if (wire.kind == 0 || wire.kind >= ARL_ALLOC_KINDS_END || wire.unit.kind > ARL_UNIT_MIG ||
        wire.reserved != 0 || wire.size == 0 || wire.size > INT64_MAX) {
        return arl_error_set(err, ARL_ERR_SYNC, READ,
                             "offer is not valid: allocation %u has kind %u, %llu bytes, device "
                             "kind %u",
                             index, wire.kind, (unsigned long long)wire.size, wire.unit.kind);
    }
    if (wire.kind == ARL_ALLOC_SHM && !terminated((const char *)wire.handle, sizeof(wire.handle))) {
        return arl_error_set(err, ARL_ERR_SYNC, READ,
                             "offer is not valid: the name of allocation %u has no end", index);
    }
    alloc_p->kind = (arl_alloc_kind_t)wire.kind;
    alloc_p->size = wire.size;
    alloc_p->base_id = wire.base_id;
    unit_from_wire(&wire.unit, &alloc_p->unit);
    memcpy(alloc_p->handle, wire.handle, sizeof(wire.handle));
    return ARL_OK;
}

/* Strict UTF-8: no overlong forms, no surrogates, nothing above U+10FFFF, no NUL. */
static bool
utf8_valid(const uint8_t *text, size_t size)
{
    for (size_t i = 0; i < size;) {
        const uint8_t lead = text[i];
        size_t more = lead < 0x80 ? 0 : lead < 0xe0 ? 1 : lead < 0xf0 ? 2 : 3;
        uint8_t low = 0x80, high = 0xbf;

        if (lead == 0 || (lead >= 0x80 && lead < 0xc2) || lead > 0xf4 || size - i <= more) {
            return false;
        }
        low = lead == 0xe0 ? 0xa0 : lead == 0xf0 ? 0x90 : low;
        high = lead == 0xed ? 0x9f : lead == 0xf4 ? 0x8f : high;
        for (size_t j = 1; j <= more; j++) {
            if (text[i + j] < low || text[i + j] > high) {
                return false;
            }
            low = 0x80;
            high = 0xbf;
        }
        i += more + 1;
    }
    return true;
}

/* True when every element lies within `size` bytes, the first one being at `offset`. */
static bool
tensor_fits(const arl_offer_tensor_t *tensor, uint64_t size)
{
    const int64_t item = (int64_t)arl_dtype_size(tensor->dtype);
    int64_t low, high;

    if (tensor->offset > size) {
        return false;
    }
    low = (int64_t)tensor->offset; /* size <= INT64_MAX */
    high = low;
    for (int i = 0; i < tensor->ndim; i++) {
        int64_t reach;

        if (tensor->shape[i] == 0) {
            return true;
        }
        if (__builtin_mul_overflow(tensor->shape[i] - 1, tensor->strides[i], &reach) ||
            (reach < 0 ? __builtin_add_overflow(low, reach, &low)
                       : __builtin_add_overflow(high, reach, &high))) {
            return false;
        }
    }
    return low >= 0 && high <= (int64_t)size && item <= (int64_t)size - high;
}

/* Copies the fields that are valid by themselves. */
static arl_status_t
read_tensor(const wire_tensor_t *wire, uint32_t index, arl_offer_tensor_t *tensor_p,
            arl_error_t *err)
{
    arl_view_t view = {0};

    if (!arl_dtype_valid(wire->dtype)) {
        return arl_error_set(err, ARL_ERR_SYNC, READ,
                             "offer is not valid: dtype %u of tensor %u is not known here",
                             wire->dtype, index);
    }
    if (wire->ndim > ARL_VIEW_DIMS_MAX || wire->reserved != 0) {
        return invalid(err, "number of dimensions of a tensor", wire->ndim, ARL_VIEW_DIMS_MAX);
    }
    for (uint32_t i = wire->ndim; i < ARL_VIEW_DIMS_MAX; i++) {
        if (wire->shape[i] != 0 || wire->strides[i] != 0) {
            return arl_error_set(err, ARL_ERR_SYNC, READ,
                                 "offer is not valid: tensor %u has sizes beyond its dimensions",
                                 index);
        }
    }
    tensor_p->dtype = (arl_dtype_t)wire->dtype;
    tensor_p->ndim = (int)wire->ndim;
    tensor_p->alloc = wire->alloc;
    tensor_p->alias_of = wire->alias_of;
    tensor_p->offset = wire->offset;
    memcpy(tensor_p->shape, wire->shape, sizeof(wire->shape));
    memcpy(tensor_p->strides, wire->strides, sizeof(wire->strides));
    view.ndim = tensor_p->ndim;
    view.itemsize = arl_dtype_size(tensor_p->dtype);
    memcpy(view.shape, wire->shape, sizeof(wire->shape));
    for (int i = 0; i < view.ndim; i++) {
        if (view.shape[i] < 0) {
            return arl_error_set(err, ARL_ERR_SYNC, READ,
                                 "offer is not valid: tensor %u has size %lld", index,
                                 (long long)view.shape[i]);
        }
    }
    if (arl_view_nbytes(&view) < 0) {
        return arl_error_set(err, ARL_ERR_SYNC, READ,
                             "offer is not valid: the sizes of tensor %u overflow", index);
    }
    return ARL_OK;
}

/* Checks what relates a tensor to its allocation and to the tensor it is an alias of. */
static arl_status_t
check_tensor(const arl_offer_t *offer, uint32_t index, arl_error_t *err)
{
    const arl_offer_tensor_t *tensor = &offer->tensors[index], *first;

    if (tensor->alloc == ARL_OFFER_STREAMED) {
        if (tensor->offset != 0) {
            return invalid(err, "offset of a streamed tensor", tensor->offset, 0);
        }
    }
    else if (tensor->alloc >= offer->alloc_count) {
        return invalid(err, "allocation of a tensor", tensor->alloc, offer->alloc_count);
    }
    else if (!tensor_fits(tensor, offer->allocs[tensor->alloc].size)) {
        return arl_error_set(err, ARL_ERR_SYNC, READ,
                             "offer is not valid: tensor %.*s at offset %llu leaves its "
                             "allocation of %llu bytes",
                             (int)tensor->name_length, tensor->name,
                             (unsigned long long)tensor->offset,
                             (unsigned long long)offer->allocs[tensor->alloc].size);
    }
    if (tensor->alias_of > index) {
        return invalid(err, "alias of a tensor", tensor->alias_of, index);
    }
    first = &offer->tensors[tensor->alias_of];
    if (first->alias_of != tensor->alias_of || first->dtype != tensor->dtype ||
        first->ndim != tensor->ndim || first->alloc != tensor->alloc ||
        first->offset != tensor->offset ||
        memcmp(first->shape, tensor->shape, sizeof(first->shape)) != 0 ||
        memcmp(first->strides, tensor->strides, sizeof(first->strides)) != 0) {
        return arl_error_set(err, ARL_ERR_SYNC, READ,
                             "offer is not valid: tensor %.*s is not the same as %.*s, which it "
                             "is said to be an alias of",
                             (int)tensor->name_length, tensor->name, (int)first->name_length,
                             first->name);
    }
    return ARL_OK;
}

/* Where the parts of a body begin. */
typedef struct sections {
    const uint8_t *tensors, *checksums, *names;
    uint32_t names_size;
} sections_t;

static sections_t
find_sections(const uint8_t *body, const arl_offer_t *offer, uint32_t names_size)
{
    sections_t at = {.tensors = body + offer->alloc_count * sizeof(wire_alloc_t),
                     .names_size = names_size};

    at.checksums = at.tensors + offer->tensor_count * sizeof(wire_tensor_t);
    at.names = at.checksums + checksums_size(offer->verify, offer->tensor_count);
    return at;
}

/* The copy of the bytes that a decoded offer keeps behind its arrays. */
static const uint8_t *
stored_body(const arl_offer_t *offer)
{
    return (const uint8_t *)offer->storage + offer->alloc_count * sizeof(arl_offer_alloc_t) +
           offer->tensor_count * sizeof(arl_offer_tensor_t);
}

static arl_status_t
read_tensors(const sections_t *at, arl_offer_t *offer, arl_error_t *err)
{
    const uint8_t *names = at->names;
    uint32_t names_size = at->names_size;
    arl_names_t index = {0};
    arl_status_t status = arl_names_init(&index, offer->tensor_count, err);

    if (status != ARL_OK) {
        return status;
    }
    for (uint32_t i = 0; i < offer->tensor_count; i++) {
        arl_offer_tensor_t *tensor = &offer->tensors[i];
        wire_tensor_t wire;

        memcpy(&wire, at->tensors + (size_t)i * sizeof(wire), sizeof(wire));
        if (wire.name_length == 0 || wire.name_length > ARL_OFFER_NAME_MAX ||
            wire.name_length > names_size || !utf8_valid(names, wire.name_length)) {
            status = arl_error_set(err, ARL_ERR_SYNC, READ,
                                   "offer is not valid: tensor %u has no valid name (%u bytes)", i,
                                   wire.name_length);
            goto free_index;
        }
        tensor->name = (const char *)names;
        tensor->name_length = wire.name_length;
        names += wire.name_length;
        names_size -= wire.name_length;
        if (arl_names_add(&index, tensor->name, tensor->name_length, i) != i) {
            status = arl_error_set(err, ARL_ERR_SYNC, READ,
                                   "offer is not valid: the name %.*s comes twice",
                                   (int)tensor->name_length, tensor->name);
            goto free_index;
        }
        ARL_CHECK_GOTO(status, read_tensor(&wire, i, tensor, err), free_index);
        ARL_CHECK_GOTO(status, check_tensor(offer, i, err), free_index);
        if (offer->verify != ARL_VERIFY_NONE) {
            memcpy(&tensor->checksum, at->checksums + (size_t)i * sizeof(uint64_t),
                   sizeof(uint64_t));
        }
    }
    if (names_size != 0) {
        status =
            arl_error_set(err, ARL_ERR_SYNC, READ,
                          "offer is not valid: %u bytes of names belong to no tensor", names_size);
    }
free_index:
    arl_names_free(&index);
    return status;
}

/*
 * When an earlier offer had the very same records and names, and allocations of the same sizes,
 * everything that was checked and computed of them then holds, and is copied. False otherwise.
 */
static bool
read_as_known(const sections_t *at, const arl_offer_t *known, arl_offer_t *offer)
{
    sections_t then;

    if (known == NULL || known->tensor_count != offer->tensor_count ||
        known->alloc_count != offer->alloc_count || known->layout_id != offer->layout_id) {
        return false;
    }
    then = find_sections(stored_body(known), known, 0);
    then.names_size = (uint32_t)(known->blob - then.names);
    if (then.names_size != at->names_size || memcmp(then.names, at->names, at->names_size) != 0 ||
        memcmp(then.tensors, at->tensors, offer->tensor_count * sizeof(wire_tensor_t)) != 0) {
        return false;
    }
    for (uint32_t i = 0; i < offer->alloc_count; i++) {
        if (known->allocs[i].size != offer->allocs[i].size) {
            return false;
        }
    }
    memcpy(offer->tensors, known->tensors, offer->tensor_count * sizeof(*offer->tensors));
    for (uint32_t i = 0; i < offer->tensor_count; i++) {
        arl_offer_tensor_t *tensor = &offer->tensors[i];

        tensor->name = (const char *)at->names + (tensor->name - (const char *)then.names);
        tensor->checksum = 0;
        if (offer->verify != ARL_VERIFY_NONE) {
            memcpy(&tensor->checksum, at->checksums + (size_t)i * sizeof(uint64_t),
                   sizeof(uint64_t));
        }
    }
    return true;
}

static void
read_header(const wire_header_t *wire, arl_offer_t *offer)
{
    offer->transport = wire->transport;
    offer->verify = (arl_verify_t)wire->verify;
    offer->receivers = wire->receivers;
    offer->senders = wire->senders;
    offer->sender_rank = wire->sender_rank;
    memcpy(offer->sender.boot_id, wire->boot_id, sizeof(wire->boot_id));
    offer->sender.pid_namespace = wire->pid_namespace;
    offer->sender.pid = wire->pid;
    offer->sender.start_time = wire->start_time;
    unit_from_wire(&wire->unit, &offer->unit);
    memcpy(offer->host, wire->host, sizeof(wire->host));
    memcpy(offer->control, wire->control, sizeof(wire->control));
    memcpy(offer->fallback, wire->fallback, sizeof(wire->fallback));
    memcpy(offer->nonce, wire->nonce, sizeof(wire->nonce));
    offer->epoch = wire->epoch;
    offer->layout_id = wire->layout_id;
    offer->alloc_count = wire->alloc_count;
    offer->tensor_count = wire->tensor_count;
    offer->blob_size = wire->blob_size;
}

/* `offer->storage` begins with the arrays and ends with a copy of the bytes after the header. */
static arl_status_t
read_body(const wire_header_t *wire, const uint8_t *body, const arl_offer_t *known,
          arl_offer_t *offer, arl_error_t *err)
{
    const sections_t at = find_sections(body, offer, wire->names_size);
    arl_status_t status;

    for (uint32_t i = 0; i < wire->alloc_count; i++) {
        status = read_alloc(body + i * sizeof(wire_alloc_t), i, &offer->allocs[i], err);
        if (status != ARL_OK) {
            return status;
        }
    }
    offer->blob = at.names + wire->names_size;
    if (read_as_known(&at, known, offer)) {
        return ARL_OK;
    }
    status = read_tensors(&at, offer, err);
    if (status != ARL_OK) {
        return status;
    }
    if (arl_offer_layout_id(offer) != offer->layout_id) {
        return arl_error_set(err, ARL_ERR_SYNC, READ,
                             "offer is not valid: its layout id is not that of its tensors");
    }
    return ARL_OK;
}

arl_status_t
arl_offer_decode(const void *bytes, size_t size, const arl_offer_t *known, arl_offer_t *offer_p,
                 arl_error_t *err)
{
    arl_offer_t offer = {0};
    wire_header_t wire;
    size_t allocs_size, tensors_size;
    uint8_t *body;
    arl_status_t status = read_frame(bytes, size, &wire, err);

    if (status != ARL_OK || (status = check_header(&wire, err)) != ARL_OK) {
        return status;
    }
    allocs_size = wire.alloc_count * sizeof(arl_offer_alloc_t);
    tensors_size = wire.tensor_count * sizeof(arl_offer_tensor_t);
    offer.storage = calloc(1, allocs_size + tensors_size + size - sizeof(wire) + 1);
    if (offer.storage == NULL) {
        return arl_error_set(err, ARL_ERR_NOMEM, READ, "out of memory for an offer of %zu bytes",
                             size);
    }
    offer.allocs = offer.storage;
    offer.tensors = (arl_offer_tensor_t *)((char *)offer.storage + allocs_size);
    body = (uint8_t *)offer.storage + allocs_size + tensors_size;
    memcpy(body, (const uint8_t *)bytes + sizeof(wire), size - sizeof(wire));
    read_header(&wire, &offer);
    status = read_body(&wire, body, known, &offer, err);
    if (status != ARL_OK) {
        arl_offer_free(&offer);
        return status;
    }
    *offer_p = offer;
    return ARL_OK;
}

void
arl_offer_free(arl_offer_t *offer)
{
    free(offer->storage);
    *offer = (arl_offer_t){0};
}
