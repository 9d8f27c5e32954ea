/* SPDX-License-Identifier: Apache-2.0 */
/*
 * host_shm: the sender copies its tensors into one file of shared memory when it makes the
 * offer, densely, each at a multiple of 256 bytes; receivers map the file and copy from it. The
 * sender may change its tensors as soon as the offer is made.
 */
#include "core/arl_hash.h"

#include "transport/arl_sender.h"
#include "transport/arl_shm.h"
#include "transport/arl_transport.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { ALIGNMENT = 256 };

typedef struct host_export {
    arl_export_t base;
    arl_shm_t shm;
    const char *address; /* base.bases points here */
} host_export_t;

typedef struct host_import {
    arl_import_t base;
    arl_shm_t shm;
    arl_export_t *local; /* instead of shm */
    const char *address;
} host_import_t;

static arl_status_t
host_probe(arl_error_t *err)
{
    (void)err; /* what may be missing is found, and told, when the file is made */
    return ARL_OK;
}

/* ---- sender ---------------------------------------------------------------------------------- */

/* Gives each distinct tensor its place. Returns the size of the file, at least 1. */
static arl_status_t
lay_out(const arl_export_request_t *request, arl_offer_t *offer, int64_t *bytes_p, size_t *size_p,
        arl_error_t *err)
{
    int64_t size = 0, bytes = 0;

    for (uint32_t i = 0; i < request->count; i++) {
        arl_offer_tensor_t *tensor = &offer->tensors[i];
        const arl_source_t *source = &request->sources[i];
        const int64_t nbytes = arl_view_nbytes(&source->view);
        int64_t stride = (int64_t)source->view.itemsize;

        if (source->view.data == NULL && nbytes > 0) {
            return arl_error_set(err, ARL_ERR_VALUE, "offer",
                                 "%.*s is a specification without data; host_shm sends tensors "
                                 "that exist when the offer is made",
                                 (int)source->name_length, source->name);
        }
        for (int d = tensor->ndim - 1; d >= 0; d--) {
            tensor->strides[d] = stride;
            stride *= tensor->shape[d] > 0 ? tensor->shape[d] : 1;
        }
        tensor->alloc = 0;
        if (tensor->alias_of != i) {
            tensor->offset = offer->tensors[tensor->alias_of].offset;
            continue;
        }
        tensor->offset = (uint64_t)size;
        bytes += nbytes;
        if (__builtin_add_overflow(size, nbytes, &size) ||
            __builtin_add_overflow(size, ALIGNMENT - 1, &size)) {
            return arl_error_set(err, ARL_ERR_VALUE, "offer",
                                 "the tensors are larger than any memory");
        }
        size -= size % ALIGNMENT;
    }
    *bytes_p = bytes;
    *size_p = size > 0 ? (size_t)size : 1;
    return ARL_OK;
}

/* Copies the distinct tensors to their places, over several threads. */
static arl_status_t
fill(const arl_export_request_t *request, const arl_offer_t *offer, char *map, arl_error_t *err)
{
    arl_plan_t plan = {0};
    const char **bases = malloc(((size_t)request->count + 1) * sizeof(*bases));
    arl_status_t status;

    plan.copies = calloc((size_t)request->count + 1, sizeof(*plan.copies));
    if (bases == NULL || plan.copies == NULL) {
        status = arl_error_set(err, ARL_ERR_NOMEM, "offer", "out of memory for %u tensors",
                               request->count);
        goto free_plan;
    }
    for (uint32_t i = 0; i < request->count; i++) {
        const arl_offer_tensor_t *tensor = &offer->tensors[i];
        const arl_view_t *view = &request->sources[i].view;
        arl_copy_t *copy = &plan.copies[plan.count];

        copy->alloc = i;
        copy->tensor = i;
        copy->dst = map + tensor->offset;
        bases[i] = view->data;
        if (tensor->alias_of == i && arl_copy_shape(copy, view->itemsize, view->ndim, view->shape,
                                                    view->strides, tensor->strides)) {
            plan.total_bytes += arl_copy_bytes(copy);
            plan.count++;
        }
    }
    status = arl_plan_run_host(&plan, bases, err);
free_plan:
    arl_plan_free(&plan);
    free(bases);
    return status;
}

/* From the caller's own tensors and not from the copies, so that the first copy is checked too. */
static void
add_checksums(const arl_export_request_t *request, arl_offer_t *offer)
{
    for (uint32_t i = 0; i < request->count; i++) {
        if (arl_offer_has_checksum(offer, i)) {
            offer->tensors[i].checksum = arl_checksum_view(&request->sources[i].view);
        }
    }
}

static arl_status_t
host_offer(const arl_export_request_t *request, arl_offer_t *offer, arl_export_t **export_p,
           arl_error_t *err)
{
    host_export_t *export = calloc(1, sizeof(*export));
    size_t size = 0;
    arl_status_t status;

    offer->allocs = calloc(1, sizeof(*offer->allocs));
    if (export == NULL || offer->allocs == NULL) {
        status = arl_error_set(err, ARL_ERR_NOMEM, "offer", "out of memory");
        goto free_export;
    }
    ARL_CHECK_GOTO(status, lay_out(request, offer, &export->base.bytes, &size, err), free_export);
    ARL_CHECK_GOTO(status, arl_shm_create(size, &export->shm, err), free_export);
    ARL_CHECK_GOTO(status, fill(request, offer, export->shm.map, err), close_shm);
    add_checksums(request, offer);
    offer->alloc_count = 1;
    offer->allocs[0].kind = ARL_ALLOC_SHM;
    offer->allocs[0].size = size;
    memcpy(offer->allocs[0].handle, export->shm.name, sizeof(export->shm.name));
    export->address = export->shm.map;
    export->base.bases = &export->address;
    export->base.extra_bytes = (int64_t)size;
    *export_p = &export->base;
    return ARL_OK;
close_shm:
    arl_shm_close(&export->shm);
free_export:
    free(export);
    return status;
}

static void
host_destroy(arl_export_t *base, bool forked)
{
    host_export_t *export = (host_export_t *)base;

    if (forked) {
        arl_shm_forget(&export->shm);
    }
    else {
        arl_shm_close(&export->shm);
    }
    free(export);
}

/* ---- receiver -------------------------------------------------------------------------------- */

static void
host_close(arl_import_t **import_io, bool keep)
{
    host_import_t *import = (host_import_t *)*import_io;

    (void)keep; /* the next offer comes with a file of its own */
    if (import == NULL) {
        return;
    }
    if (import->local != NULL) {
        arl_export_drop(import->local);
    }
    arl_shm_close(&import->shm);
    free(import);
    *import_io = NULL;
}

static arl_status_t
host_map(const arl_pull_t *pull, host_import_t *import, arl_error_t *err)
{
    const arl_offer_alloc_t *alloc = &pull->offer->allocs[0];
    arl_error_t reason = ARL_ERROR_INIT;
    arl_status_t status;

    status = arl_shm_open((const char *)alloc->handle, (size_t)alloc->size,
                          pull->views ? ARL_SHM_COPY : ARL_SHM_READ, &import->shm, &reason);
    if (status == ARL_ERR_PEER_LOST && pull->control != NULL) {
        /* The name is gone: the sender has released the offer, or died and was swept away. */
        arl_status_t why = arl_control_check_sender(pull->control, err);

        return why != ARL_OK
                   ? why
                   : arl_error_set(err, ARL_ERR_SYNC, "pull",
                                   "the shared memory of this offer was removed: %s", reason.text);
    }
    if (status != ARL_OK) {
        return arl_error_copy(err, &reason);
    }
    import->address = import->shm.map;
    import->base.mappings = 1;
    return ARL_OK;
}

static arl_status_t
host_open(const arl_pull_t *pull, arl_import_t **import_io, arl_error_t *err)
{
    const arl_offer_t *offer = pull->offer;
    host_import_t *import;
    arl_status_t status = ARL_OK;

    if (offer->alloc_count != 1 || offer->allocs[0].kind != ARL_ALLOC_SHM) {
        return arl_error_set(err, ARL_ERR_SYNC, "pull",
                             "offer is not valid: host_shm has one file of shared memory");
    }
    import = calloc(1, sizeof(*import));
    if (import == NULL) {
        return arl_error_set(err, ARL_ERR_NOMEM, "pull", "out of memory");
    }
    import->base.transport = &arl_transport_host_shm;
    import->base.bases = &import->address;
    if (pull->local != NULL && !pull->views) {
        import->address = pull->local->bases[0];
        import->local = arl_export_hold(pull->local);
    }
    else {
        status = host_map(pull, import, err);
    }
    if (status != ARL_OK) {
        free(import);
        return status;
    }
    if (arl_control_opened(pull->control)) {
        arl_shm_t name_only = {0};

        memcpy(name_only.name, offer->allocs[0].handle, sizeof(name_only.name));
        arl_shm_unlink(&name_only);
    }
    *import_io = &import->base;
    return ARL_OK;
}

static arl_status_t
host_copy(const arl_pull_t *pull, arl_import_t *import, arl_error_t *err)
{
    return arl_plan_run_host(pull->plan, import->bases, err);
}

static arl_status_t
host_checksum(const arl_pull_t *pull, const arl_view_t *view, uint64_t *sum_p, arl_error_t *err)
{
    (void)pull;
    (void)err;
    *sum_p = arl_checksum_view(view);
    return ARL_OK;
}

const arl_transport_t arl_transport_host_shm = {
    .id = ARL_TRANSPORT_HOST_SHM,
    .name = "host_shm",
    .needs_gpu = false,
    .same_host = true,
    .streams = false,
    .in_place = false,
    .probe = host_probe,
    .offer = host_offer,
    .destroy = host_destroy,
    .open = host_open,
    .copy = host_copy,
    .checksum = host_checksum,
    .close = host_close,
};
