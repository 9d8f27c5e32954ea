/* SPDX-License-Identifier: Apache-2.0 */
#ifndef ARL_PYTHON_DLPACK_H
#define ARL_PYTHON_DLPACK_H

#include "core/arl_dtype.h"

#include <stddef.h>

/*
 * The part of the DLPack 1.0 ABI that is spoken here, declared from its published layout
 * (dmlc/dlpack): a C struct contract between processes' libraries, so nothing to link.
 */
#define ARL_DL_CAPSULE "dltensor"
#define ARL_DL_CAPSULE_USED "used_dltensor"
#define ARL_DL_CAPSULE_VERSIONED "dltensor_versioned"
#define ARL_DL_CAPSULE_VERSIONED_USED "used_dltensor_versioned"
#define ARL_DL_EXCHANGE_ATTRIBUTE "__dlpack_c_exchange_api__"
#define ARL_DL_EXCHANGE_CAPSULE "dlpack_exchange_api"

enum { ARL_DL_CPU = 1, ARL_DL_CUDA = 2, ARL_DL_CUDA_HOST = 3 };
enum { ARL_DL_FLAG_READ_ONLY = 1 };

typedef struct arl_dl_device {
    int32_t type;
    int32_t id;
} arl_dl_device_t;

typedef struct arl_dl_dtype {
    uint8_t code;
    uint8_t bits;
    uint16_t lanes;
} arl_dl_dtype_t;

typedef struct arl_dl_tensor {
    void *data;
    arl_dl_device_t device;
    int32_t ndim;
    arl_dl_dtype_t dtype;
    int64_t *shape;
    int64_t *strides; /* in elements; NULL: dense row-major */
    uint64_t byte_offset;
} arl_dl_tensor_t;

typedef struct arl_dl_managed {
    arl_dl_tensor_t tensor;
    void *manager;
    void (*deleter)(struct arl_dl_managed *self);
} arl_dl_managed_t;

typedef struct arl_dl_managed_versioned {
    struct {
        uint32_t major;
        uint32_t minor;
    } version;
    void *manager;
    void (*deleter)(struct arl_dl_managed_versioned *self);
    uint64_t flags;
    arl_dl_tensor_t tensor;
} arl_dl_managed_versioned_t;

/* DLPack 1.3's table of functions of one type of tensors. Only `look` is called here. */
typedef struct arl_dl_exchange {
    struct {
        uint32_t major;
        uint32_t minor;
    } version;
    const struct arl_dl_exchange *older;
    void (*allocate)(void);
    void (*export_managed)(void);
    void (*import_managed)(void);
    /* Fills a description that holds while the object is neither changed nor let go. Returns 0,
     * or -1 with an exception. May be NULL. */
    int (*look)(void *object, arl_dl_tensor_t *tensor_p);
    void (*current_stream)(void);
} arl_dl_exchange_t;

_Static_assert(offsetof(arl_dl_exchange_t, look) == 40, "DLPackExchangeAPI layout");
_Static_assert(sizeof(arl_dl_tensor_t) == 48, "DLTensor layout");
_Static_assert(sizeof(arl_dl_managed_t) == 64, "DLManagedTensor layout");
_Static_assert(sizeof(arl_dl_managed_versioned_t) == 80, "DLManagedTensorVersioned layout");

/* ARL_DTYPE_NONE when the combination is not one of ours. */
arl_dtype_t arl_dlpack_dtype(arl_dl_dtype_t dtype);
arl_dl_dtype_t arl_dlpack_from_dtype(arl_dtype_t dtype);

#endif
