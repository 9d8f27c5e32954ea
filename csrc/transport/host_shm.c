/* SPDX-License-Identifier: Apache-2.0 */
/*
 * host_shm: the sender copies its tensors into one file of shared memory when it makes the
 * offer, densely, each at a multiple of 256 bytes; receivers map the file and copy from it. The
 * sender may change its tensors as soon as the offer is made.
 *
 * Tensors in GPU memory pass through the same file, on either side (host_shm_cuda.c): where NCCL
 * and CUDA IPC are not to be had, or one of the two is on the CPU.
 *
 * The file is for one offer, and its name goes when the last receiver has opened it; or, with
 * keep_mapped, it stays for the next offers (base_id is not 0 then), since making its pages
 * takes several times longer than filling them.
 */
#include "core/arl_hash.h"

#include "transport/arl_sender.h"
#include "transport/arl_shm.h"
#include "transport/arl_transport.h"
#include "transport/host_shm_cuda.h"

#include <stdlib.h>
#include <string.h>

enum { ALIGNMENT = ARL_STREAM_ALIGN };

/* The file, which may outlive the offer. Counted: what a sender keeps, and each export. */
typedef struct host_file {
    arl_shm_t shm;
    arl_host_source_t *source; /* what fills it from GPU memory, when that is kept; or NULL */
    _Atomic int references;
} host_file_t;

typedef struct host_export {
    arl_export_t base;
    host_file_t *file;
    arl_chunk_geometry_t blob;
    const char *address; /* base.bases points here */
} host_export_t;

typedef struct host_import {
    arl_import_t base;
    arl_shm_t shm;
    arl_export_t *local; /* instead of shm */
    const char *address;
    bool reusable;             /* the next offer may come in the same file */
    arl_host_target_t *target; /* what empties it into GPU memory, or NULL */
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
fill_from_host(const arl_export_request_t *request, const arl_offer_t *offer, char *map,
               arl_error_t *err)
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

static void
file_drop(host_file_t *file, bool forked)
{
    if (atomic_fetch_sub(&file->references, 1) != 1) {
        return;
    }
    if (!arl_host_source_free(file->source, forked)) {
        arl_shm_unlink(&file->shm); /* a device that hangs may still write to it */
    }
    else if (forked) {
        arl_shm_forget(&file->shm);
    }
    else {
        arl_shm_close(&file->shm);
    }
    free(file);
}

static void
host_discard(void **kept, bool forked)
{
    if (*kept != NULL) {
        file_drop(*kept, forked);
        *kept = NULL;
    }
}

/* The kept file if it is large enough, or a new one, which is then kept if that is wanted. */
static arl_status_t
take_file(const arl_export_request_t *request, size_t size, host_file_t **file_p, arl_error_t *err)
{
    host_file_t *file = *request->kept;
    arl_status_t status;

    if (file != NULL && file->shm.size >= size) {
        atomic_fetch_add(&file->references, 1);
        *file_p = file;
        return ARL_OK;
    }
    host_discard(request->kept, false); /* first: there may not be room for both */
    file = calloc(1, sizeof(*file));
    if (file == NULL) {
        return arl_error_set(err, ARL_ERR_NOMEM, "offer", "out of memory");
    }
    status = arl_shm_create(size, &file->shm, err);
    if (status != ARL_OK) {
        free(file);
        return status;
    }
    file->references = 1;
    if (request->keep) {
        file->references = 2;
        *request->kept = file;
    }
    *file_p = file;
    return ARL_OK;
}

/* Copies the tensors and sums those that are to be verified. */
static arl_status_t
fill(const arl_export_request_t *request, arl_offer_t *offer, host_export_t *export,
     arl_error_t *err)
{
    host_file_t *file = export->file;
    arl_status_t status;

    export->base.extra_bytes = (int64_t)file->shm.size;
    if (request->sources[0].view.device_type != ARL_DEVICE_CUDA) {
        status = fill_from_host(request, offer, file->shm.map, err);
        if (status == ARL_OK) {
            add_checksums(request, offer);
        }
        return status;
    }
    status = arl_host_source_fill(request, offer, &export->blob, file->shm.map, file->shm.size,
                                  &file->source, err);
    if (status != ARL_OK) {
        host_discard(request->kept, false); /* what is half done serves no other offer */
        return status;
    }
    export->base.extra_bytes += arl_host_source_bytes(file->source);
    if (!request->keep) {
        (void)arl_host_source_free(file->source, false); /* all is done, so nothing runs */
        file->source = NULL;
    }
    return ARL_OK;
}

static arl_status_t
host_offer(const arl_export_request_t *request, arl_offer_t *offer, arl_export_t **export_p,
           arl_error_t *err)
{
    host_export_t *export = calloc(1, sizeof(*export));
    arl_offer_alloc_t *alloc = offer->allocs = calloc(1, sizeof(*offer->allocs));
    size_t size = 0;
    arl_status_t status;

    if (export == NULL || alloc == NULL) {
        status = arl_error_set(err, ARL_ERR_NOMEM, "offer", "out of memory");
        goto free_export;
    }
    ARL_CHECK_GOTO(status, lay_out(request, offer, &export->base.bytes, &size, err), free_export);
    ARL_CHECK_GOTO(status, arl_host_geometry(request->ring_bytes, &export->blob, err), free_export);
    ARL_CHECK_GOTO(status, take_file(request, size, &export->file, err), free_export);
    ARL_CHECK_GOTO(status, fill(request, offer, export, err), drop_file);
    offer->alloc_count = 1;
    alloc->kind = ARL_ALLOC_SHM;
    alloc->size = export->file->shm.size;
    alloc->base_id = request->keep;
    memcpy(alloc->handle, export->file->shm.name, sizeof(export->file->shm.name));
    offer->blob = (const uint8_t *)&export->blob;
    offer->blob_size = sizeof(export->blob);
    export->address = export->file->shm.map;
    export->base.bases = &export->address;
    export->base.in_place = request->keep;
    *export_p = &export->base;
    return ARL_OK;
drop_file:
    file_drop(export->file, false);
free_export:
    free(export);
    return status;
}

static void
host_destroy(arl_export_t *base, bool forked)
{
    host_export_t *export = (host_export_t *)base;

    file_drop(export->file, forked);
    free(export);
}

/* ---- receiver -------------------------------------------------------------------------------- */

/* Lets go of what it has open; the struct stays. */
static void
unmap(host_import_t *import)
{
    /* What a device that hangs may still read stays mapped. */
    const bool idle = arl_host_target_free(import->target);

    import->target = NULL;
    if (import->local != NULL && idle) {
        arl_export_drop(import->local);
    }
    import->local = NULL;
    if (idle) {
        arl_shm_close(&import->shm);
    }
    memset(&import->shm, 0, sizeof(import->shm));
    import->base.mappings = 0;
}

static void
host_close(arl_import_t **import_io, bool keep)
{
    host_import_t *import = (host_import_t *)*import_io;

    if (import == NULL || (keep && import->reusable)) {
        return;
    }
    unmap(import);
    free(import);
    *import_io = NULL;
}

static arl_status_t
map(const arl_pull_t *pull, host_import_t *import, arl_error_t *err)
{
    const arl_offer_alloc_t *alloc = &pull->offer->allocs[0];
    const char *name = (const char *)alloc->handle;
    arl_error_t reason = ARL_ERROR_INIT;
    arl_status_t status;

    /* A name is given once, so the same name is the same file. Views need a mapping of their own
     * kind, and take it away with them. */
    if (!pull->views && import->base.mappings > 0 && import->shm.size == alloc->size &&
        strcmp(import->shm.name, name) == 0) {
        return ARL_OK;
    }
    unmap(import);
    status = arl_shm_open(name, (size_t)alloc->size, pull->views ? ARL_SHM_COPY : ARL_SHM_READ,
                          &import->shm, &reason);
    if (status == ARL_ERR_PEER_LOST) {
        /* The name is gone: the sender has released the offer, or died and was swept away. */
        status = arl_control_check_sender(pull->control, err);
        return status != ARL_OK
                   ? status
                   : arl_error_set(err, ARL_ERR_SYNC, "pull",
                                   "the shared memory of this offer was removed: %s", reason.text);
    }
    if (status != ARL_OK) {
        return arl_error_copy(err, &reason);
    }
    import->address = import->shm.map;
    import->reusable = alloc->base_id != 0 && !pull->views;
    import->base.mappings = 1;
    return ARL_OK;
}

/* The part for GPU memory, if there is any. */
static arl_status_t
prepare(const arl_pull_t *pull, host_import_t *import, arl_error_t *err)
{
    arl_status_t status = ARL_OK;

    import->base.extra_bytes = 0;
    import->base.fallback = NULL;
    if (!pull->views) {
        status = arl_host_target_prepare(pull, import->address, import->shm.size,
                                         pull->keep && import->reusable, &import->target, err);
    }
    if (status == ARL_OK && import->target != NULL) {
        import->base.extra_bytes = arl_host_target_bytes(import->target);
        import->base.fallback = arl_host_target_fallback(import->target);
    }
    return status;
}

static arl_status_t
host_open(const arl_pull_t *pull, arl_import_t **import_io, arl_error_t *err)
{
    const arl_offer_t *offer = pull->offer;
    host_import_t *import = (host_import_t *)*import_io;
    arl_status_t status;

    if (offer->alloc_count != 1 || offer->allocs[0].kind != ARL_ALLOC_SHM) {
        return arl_error_set(err, ARL_ERR_SYNC, "pull",
                             "offer is not valid: host_shm has one file of shared memory");
    }
    if (import == NULL && (import = calloc(1, sizeof(*import))) == NULL) {
        return arl_error_set(err, ARL_ERR_NOMEM, "pull", "out of memory");
    }
    *import_io = &import->base;
    import->base.transport = &arl_transport_host_shm;
    import->base.bases = &import->address;
    if (pull->local != NULL && !pull->views) {
        unmap(import);
        import->local = arl_export_hold(pull->local);
        import->address = import->local->bases[0];
        import->reusable = false;
    }
    else {
        status = map(pull, import, err);
        if (status != ARL_OK) {
            return status; /* the caller closes what is in *import_io */
        }
    }
    if (arl_control_opened(pull->control) && offer->allocs[0].base_id == 0) {
        arl_shm_t name_only = {0};

        memcpy(name_only.name, offer->allocs[0].handle, sizeof(name_only.name));
        arl_shm_unlink(&name_only);
    }
    return prepare(pull, import, err);
}

static arl_status_t
host_copy(const arl_pull_t *pull, arl_import_t *import, arl_error_t *err)
{
    arl_host_target_t *target = ((host_import_t *)import)->target;

    return target != NULL ? arl_host_target_copy(target, pull, import->bases[0], err)
                          : arl_plan_run_host(pull->plan, import->bases, err);
}

static arl_status_t
host_checksums(const arl_pull_t *pull, arl_import_t *import, const arl_view_t *views, int64_t count,
               uint64_t *sums, arl_error_t *err)
{
    const arl_host_target_t *target = ((const host_import_t *)import)->target;

    if (target != NULL) {
        return arl_host_target_checksums(target, pull, views, count, sums, err);
    }
    for (int64_t i = 0; i < count; i++) {
        sums[i] = arl_checksum_view(&views[i]);
    }
    return ARL_OK;
}

const arl_transport_t arl_transport_host_shm = {
    .id = ARL_TRANSPORT_HOST_SHM,
    .name = "host_shm",
    .needs_gpu = false,
    .same_host = true,
    .streams = false,
    .probe = host_probe,
    .offer = host_offer,
    .destroy = host_destroy,
    .discard = host_discard,
    .open = host_open,
    .copy = host_copy,
    .checksums = host_checksums,
    .close = host_close,
};
