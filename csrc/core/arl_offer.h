/* SPDX-License-Identifier: Apache-2.0 */
#ifndef ARL_CORE_OFFER_H
#define ARL_CORE_OFFER_H

#include "core/arl_view.h"

/*
 * The offer: what a sender hands out, and the only thing that travels outside of the transport.
 * A versioned, checksummed byte string of fixed layout (docs/design/offer.md), read without
 * trust: every number is checked against what is there before it is used, nothing in it is an
 * address that would be followed, nothing is executed.
 */

enum {
    ARL_OFFER_FORMAT = 2,
    ARL_OFFER_ID_BYTES = 16,
    ARL_OFFER_HOST_MAX = 64, /* host and control block names, with their end */
    ARL_OFFER_HANDLE_BYTES = 64,
    ARL_OFFER_REASON_MAX = 128,
    ARL_OFFER_NAME_MAX = 1023, /* bytes of a tensor's name */
    ARL_OFFER_TENSORS_MAX = 1 << 20,
    ARL_OFFER_ALLOCS_MAX = 1 << 16,
    ARL_OFFER_RECEIVERS_MAX = 4096,
    ARL_OFFER_SENDERS_MAX = 8,
    ARL_OFFER_BLOB_MAX = 1 << 16,
};

/* One past every valid allocation: the tensor's bytes come through the transport's own channel
 * (ring, nccl), densely, in the order of the offer. */
static const uint32_t ARL_OFFER_STREAMED = UINT32_MAX;

/* A process, so that its end is noticed and a reused pid is not taken for it. */
typedef struct arl_peer {
    uint8_t boot_id[ARL_OFFER_ID_BYTES]; /* of the running kernel: same id, same machine */
    uint64_t pid_namespace;              /* inode of /proc/self/ns/pid */
    int64_t pid;
    uint64_t start_time; /* clock ticks after boot */
} arl_peer_t;

typedef enum arl_unit_kind {
    ARL_UNIT_HOST = 0,
    ARL_UNIT_GPU = 1,
    ARL_UNIT_MIG = 2, /* the UUID is the instance's */
} arl_unit_kind_t;

/* The piece of hardware that holds an allocation. Ordinals differ between processes, so `index`
 * is for messages only. */
typedef struct arl_unit {
    arl_unit_kind_t kind;
    int32_t index;
    uint8_t uuid[ARL_OFFER_ID_BYTES];
} arl_unit_t;

typedef enum arl_alloc_kind {
    ARL_ALLOC_SHM = 1,      /* handle: name of a POSIX shared memory file */
    ARL_ALLOC_CUDA_IPC = 2, /* handle: cudaIpcMemHandle_t */
    ARL_ALLOC_KINDS_END,
} arl_alloc_kind_t;

typedef struct arl_offer_alloc {
    arl_alloc_kind_t kind;
    uint64_t size;    /* bytes, at least 1 */
    uint64_t base_id; /* differs for memory that was freed and allocated again at one address */
    arl_unit_t unit;
    uint8_t handle[ARL_OFFER_HANDLE_BYTES];
} arl_offer_alloc_t;

typedef struct arl_offer_tensor {
    const char *name; /* UTF-8, not terminated; lives as long as the offer */
    uint32_t name_length;
    arl_dtype_t dtype;
    int ndim;
    int64_t shape[ARL_VIEW_DIMS_MAX];
    int64_t strides[ARL_VIEW_DIMS_MAX]; /* bytes */
    uint32_t alloc;                     /* index, or ARL_OFFER_STREAMED */
    uint32_t alias_of;                  /* first tensor with the very same elements; often itself */
    uint64_t offset;                    /* bytes from the allocation's start to the first element */
    uint64_t checksum;                  /* arl_checksum_view; see `verify` */
} arl_offer_tensor_t;

/* Which tensors carry a checksum. */
typedef enum arl_verify {
    ARL_VERIFY_NONE = 0,
    ARL_VERIFY_SAMPLE = 1, /* those for which arl_offer_sampled() */
    ARL_VERIFY_ALL = 2,
    ARL_VERIFY_END,
} arl_verify_t;

typedef struct arl_offer {
    uint32_t transport; /* arl_transport_t.id; 0 is none */
    arl_verify_t verify;
    uint32_t receivers;   /* that the sender waits for */
    uint32_t senders;     /* that share in sending the weights (nccl); 1 otherwise */
    uint32_t sender_rank; /* of the one that made the offer */
    arl_peer_t sender;
    arl_unit_t unit;                     /* the sender's device, for matching before any work */
    char host[ARL_OFFER_HOST_MAX];       /* for messages */
    char control[ARL_OFFER_HOST_MAX];    /* name of the control block; empty when there is none */
    char fallback[ARL_OFFER_REASON_MAX]; /* why not the transport asked for; empty: it is */
    uint8_t nonce[ARL_OFFER_ID_BYTES];   /* random, one for the life of a sender */
    uint64_t epoch;                      /* grows with each offer of a sender; from 1 */
    uint64_t layout_id;                  /* arl_offer_layout_id(); checked when read */
    uint32_t alloc_count;
    uint32_t tensor_count;
    arl_offer_alloc_t *allocs;
    arl_offer_tensor_t *tensors;
    const uint8_t *blob; /* the transport's own, of a layout that only it knows */
    uint32_t blob_size;
    void *storage; /* what a decoded offer owns; NULL in one that is being built */
} arl_offer_t;

/* Names, dtypes, shapes and their order: two sides that agree on it agree on what is sent. */
uint64_t arl_offer_layout_id(const arl_offer_t *offer);

/* Whether tensor `index` is among those checked in this epoch; each is, every 16 epochs. */
bool arl_offer_sampled(const arl_offer_t *offer, uint32_t index);
bool arl_offer_has_checksum(const arl_offer_t *offer, uint32_t index);

/* True when both describe the same tensors in the same places, so that a plan made for one
 * holds for the other. Checksums, epochs and handles may differ. */
bool arl_offer_same_layout(const arl_offer_t *a, const arl_offer_t *b);

/* The view of tensor `index` with its allocation mapped at `base`. */
arl_view_t arl_offer_tensor_view(const arl_offer_t *offer, uint32_t index, const void *base);

/* Makes the bytes (malloc) of an offer that holds to the rules below, its layout id included. */
arl_status_t arl_offer_encode(const arl_offer_t *offer, uint8_t **bytes_p, size_t *size_p,
                              arl_error_t *err);

/*
 * Reads bytes that came from anywhere. On success every promise of this header holds: counts
 * within the limits, valid dtypes, UTF-8 names without repetition, tensors inside of their
 * allocations, aliases equal to what they name, terminated strings, the layout id right. The
 * bytes are copied: they need not live on. `known`, an earlier result or NULL, spares the work on
 * tensors that are described by the very same bytes again.
 */
arl_status_t arl_offer_decode(const void *bytes, size_t size, const arl_offer_t *known,
                              arl_offer_t *offer_p, arl_error_t *err);

void arl_offer_free(arl_offer_t *offer);

#endif
