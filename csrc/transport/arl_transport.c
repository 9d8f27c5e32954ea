/* SPDX-License-Identifier: Apache-2.0 */
#include "transport/arl_transport.h"

#include "transport/arl_peer.h"

#include <stdio.h>
#include <string.h>

static const char CHOOSE[] = "choose transport";

static const arl_transport_t *const transports[ARL_TRANSPORT_COUNT] = {
#define ARL_TRANSPORT_ENTRY(name, value, field) [value] = &arl_transport_##field,
    ARL_TRANSPORT_TABLE(ARL_TRANSPORT_ENTRY)
#undef ARL_TRANSPORT_ENTRY
};

/* ---- table ----------------------------------------------------------------------------------- */

const arl_transport_t *
arl_transport_get(uint32_t id)
{
    return id < ARL_TRANSPORT_COUNT ? transports[id] : NULL;
}

const arl_transport_t *
arl_transport_find(const char *name)
{
    for (uint32_t i = 0; i < ARL_TRANSPORT_COUNT; i++) {
        if (transports[i] != NULL && strcmp(transports[i]->name, name) == 0) {
            return transports[i];
        }
    }
    return NULL;
}

/* ---- origin ---------------------------------------------------------------------------------- */

arl_status_t
arl_transport_check_origin(const arl_transport_t *transport, const arl_offer_t *offer,
                           const char *operation, arl_error_t *err)
{
    arl_peer_t self;
    arl_status_t status = arl_peer_self(&self, err);

    if (status != ARL_OK || !transport->same_host) {
        return status;
    }
    if (memcmp(self.boot_id, offer->sender.boot_id, sizeof(self.boot_id)) != 0) {
        return arl_error_set(err, ARL_ERR_SYNC, operation,
                             "this offer is from another machine, or from before a reboot (%s, pid "
                             "%lld); %s works within one machine only: make a sender on each "
                             "machine, for the receivers there",
                             offer->host, (long long)offer->sender.pid, transport->name);
    }
    if (self.pid_namespace != offer->sender.pid_namespace) {
        return arl_error_set(err, ARL_ERR_SYNC, operation,
                             "this offer is from another container of this machine (%s): its "
                             "processes cannot be seen from here, so its end would go unnoticed; "
                             "run both with one PID namespace (docker: --pid, kubernetes: "
                             "shareProcessNamespace)",
                             offer->host);
    }
    return ARL_OK;
}

/* ---- choice ---------------------------------------------------------------------------------- */

/* Where all the tensors are. A mixture is refused, with one name of each kind. */
static arl_status_t
find_device(const arl_export_request_t *request, arl_device_type_t *device_p, arl_error_t *err)
{
    const arl_source_t *first = &request->sources[0];

    for (uint32_t i = 0; i < request->count; i++) {
        const arl_source_t *source = &request->sources[i];

        if (source->view.device_type == ARL_DEVICE_OTHER) {
            return arl_error_set(err, ARL_ERR_VALUE, CHOOSE,
                                 "%.*s is neither in CPU nor in CUDA memory (a meta tensor?); move "
                                 "it first",
                                 (int)source->name_length, source->name);
        }
        if (source->view.device_type != first->view.device_type) {
            return arl_error_set(err, ARL_ERR_VALUE, CHOOSE,
                                 "%.*s is in %s memory and %.*s in %s memory; one sender serves "
                                 "one kind: move them together, or use two senders",
                                 (int)first->name_length, first->name,
                                 first->view.device_type == ARL_DEVICE_CPU ? "CPU" : "CUDA",
                                 (int)source->name_length, source->name,
                                 source->view.device_type == ARL_DEVICE_CPU ? "CPU" : "CUDA");
        }
    }
    *device_p = first->view.device_type;
    return ARL_OK;
}

/* Wishes that no machine could fulfil together. */
static arl_status_t
check_wishes(const arl_choice_t *choice, const arl_transport_t *named, arl_error_t *err)
{
    if (choice->low_memory == 1 && choice->cuda_ipc == 0) {
        return arl_error_set(err, ARL_ERR_VALUE, CHOOSE,
                             "low_memory=True is a form of CUDA IPC and cuda_ipc=False forbids it");
    }
    if (named == NULL) {
        return ARL_OK;
    }
    if (choice->cuda_ipc == 1 && named->id != ARL_TRANSPORT_CUDA_IPC &&
        named->id != ARL_TRANSPORT_RING) {
        return arl_error_set(err, ARL_ERR_VALUE, CHOOSE,
                             "cuda_ipc=True contradicts transport=\"%s\"", named->name);
    }
    if (choice->cuda_ipc == 0 &&
        (named->id == ARL_TRANSPORT_CUDA_IPC || named->id == ARL_TRANSPORT_RING)) {
        return arl_error_set(err, ARL_ERR_VALUE, CHOOSE,
                             "cuda_ipc=False contradicts transport=\"%s\"", named->name);
    }
    if ((choice->low_memory == 0 && named->id == ARL_TRANSPORT_RING) ||
        (choice->low_memory == 1 && named->id != ARL_TRANSPORT_RING &&
         named->id != ARL_TRANSPORT_CUDA_IPC)) {
        return arl_error_set(err, ARL_ERR_VALUE, CHOOSE,
                             "low_memory=%s contradicts transport=\"%s\"",
                             choice->low_memory == 1 ? "True" : "False", named->name);
    }
    return ARL_OK;
}

static const arl_transport_t *
default_transport(const arl_choice_t *choice, arl_device_type_t device)
{
    if (device == ARL_DEVICE_CPU) {
        return choice->low_memory == 1 ? &arl_transport_ring
               : choice->cuda_ipc == 1 ? &arl_transport_cuda_ipc
                                       : &arl_transport_host_shm;
    }
    if (choice->cuda_ipc == 0) {
        return choice->colocated == 1 ? &arl_transport_host_shm : &arl_transport_nccl;
    }
    if (choice->low_memory == 1) {
        return &arl_transport_ring;
    }
    if (choice->cuda_ipc < 0 && choice->colocated == 0) {
        return &arl_transport_nccl;
    }
    return &arl_transport_cuda_ipc;
}

static arl_status_t
check_device(const arl_transport_t *transport, arl_device_type_t device, arl_error_t *err)
{
    if (transport->needs_gpu && device != ARL_DEVICE_CUDA) {
        return arl_error_set(err, ARL_ERR_UNAVAILABLE, CHOOSE,
                             "%s moves tensors of GPU memory, and these are in CPU memory; without "
                             "cuda_ipc, low_memory and transport they go over host_shm",
                             transport->name);
    }
    return ARL_OK;
}

arl_status_t
arl_transport_choose(const arl_choice_t *choice, const arl_export_request_t *request,
                     const arl_transport_t **transport_p, char *fallback, arl_error_t *err)
{
    const arl_transport_t *transport = NULL;
    arl_error_t reason = ARL_ERROR_INIT;
    arl_device_type_t device = ARL_DEVICE_CPU;
    arl_status_t status;

    fallback[0] = '\0';
    if (choice->transport != NULL) {
        transport = arl_transport_find(choice->transport);
        if (transport == NULL) {
            return arl_error_set(err, ARL_ERR_VALUE, CHOOSE,
                                 "transport \"%.40s\" is not known; there are host_shm, cuda_ipc, "
                                 "ring and nccl",
                                 choice->transport);
        }
    }
    status = check_wishes(choice, transport, err);
    if (status != ARL_OK || (status = find_device(request, &device, err)) != ARL_OK) {
        return status;
    }
    if (transport == NULL) {
        transport = default_transport(choice, device);
        if (transport == &arl_transport_ring && device == ARL_DEVICE_CUDA &&
            arl_transport_cuda_ipc.accepts(request, NULL) == ARL_OK) {
            /* low_memory bounds what a sync takes beside the weights. Where receivers can read
             * the tensors in place it takes nothing, and every byte is copied once, not twice. */
            transport = &arl_transport_cuda_ipc;
        }
        else if (transport == &arl_transport_host_shm && device == ARL_DEVICE_CUDA) {
            (void)snprintf(fallback, ARL_OFFER_REASON_MAX,
                           "cuda_ipc=False, and NCCL cannot place two ranks on one GPU");
        }
    }
    status = check_device(transport, device, err);
    if (status != ARL_OK || (status = transport->probe(err)) != ARL_OK) {
        return status;
    }
    if (request->senders > 1 && transport->join == NULL) {
        return arl_error_set(err, ARL_ERR_VALUE, CHOOSE,
                             "senders=%u is for nccl, and these tensors go over %s, where one "
                             "sender serves all receivers",
                             request->senders, transport->name);
    }
    if (transport->accepts != NULL && transport->accepts(request, &reason) != ARL_OK) {
        if (transport->id != ARL_TRANSPORT_CUDA_IPC || reason.code != ARL_ERR_UNAVAILABLE ||
            choice->low_memory == 0) {
            return arl_error_copy(err, &reason);
        }
        /* Memory that has no handle can still be copied through a ring of memory that has. */
        transport = &arl_transport_ring;
        (void)snprintf(fallback, ARL_OFFER_REASON_MAX, "%.*s", ARL_OFFER_REASON_MAX - 1,
                       reason.text);
        status = transport->probe(err);
    }
    *transport_p = transport;
    return status;
}
