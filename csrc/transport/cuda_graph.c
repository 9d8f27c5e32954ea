/* SPDX-License-Identifier: Apache-2.0 */
/* The fallback of cuda_copy.c: copies as a graph of memcpy nodes. */
#include "transport/cuda_tables.h"

enum { NODES_MAX = 1 << 20 };

/* The driver takes pitches up to this on every device. */
static const int64_t PITCH_MAX = INT32_MAX;

typedef struct builder {
    const arl_cuda_device_t *device;
    arl_cu_graph_t graph;
    arl_cu_result_t result;
} builder_t;

static bool
pitch_usable(int64_t pitch, int64_t width)
{
    return pitch >= width && pitch <= PITCH_MAX;
}

/* Rows of one plane: how many of them lie between two planes, or 0 when that is no whole number
 * or too few. */
static int64_t
rows_between(int64_t slice, int64_t pitch, int64_t height)
{
    const int64_t rows = slice > 0 ? slice / pitch : 0;

    return rows >= height && rows * pitch == slice ? rows : 0;
}

/* Describes the copy's dimensions from `first` on as one node; false when it takes several. */
static bool
node_shape(const arl_copy_t *copy, int first, arl_cu_memcpy3d_t *node)
{
    const int ndim = copy->ndim - first;
    const int row = copy->ndim - 1;
    int64_t src_rows = 0, dst_rows = 0;

    node->width = (size_t)copy->run_bytes;
    node->height = 1;
    node->depth = 1;
    if (ndim == 0) {
        return true;
    }
    if (ndim > 2 || !pitch_usable(copy->src_stride[row], copy->run_bytes) ||
        !pitch_usable(copy->dst_stride[row], copy->run_bytes)) {
        return false;
    }
    node->height = (size_t)copy->count[row];
    node->src_pitch = (size_t)copy->src_stride[row];
    node->dst_pitch = (size_t)copy->dst_stride[row];
    if (ndim == 1) {
        return true;
    }
    src_rows = rows_between(copy->src_stride[first], copy->src_stride[row], copy->count[row]);
    dst_rows = rows_between(copy->dst_stride[first], copy->dst_stride[row], copy->count[row]);
    node->depth = (size_t)copy->count[first];
    node->src_height = (size_t)src_rows;
    node->dst_height = (size_t)dst_rows;
    return src_rows > 0 && dst_rows > 0;
}

/* How many nodes the copy takes, or more than NODES_MAX. */
static int64_t
count_nodes(const arl_copy_t *copy)
{
    arl_cu_memcpy3d_t params = {0};
    int64_t nodes = 1;

    for (int first = 0; nodes <= NODES_MAX && !node_shape(copy, first, &params); first++) {
        nodes *= copy->count[first]; /* at most NODES_MAX times an array's size: fits */
    }
    return nodes;
}

/* False when a node could not be added: builder->result. */
static bool
add_nodes(builder_t *builder, const arl_copy_t *copy, int first, uintptr_t src, uintptr_t dst)
{
    arl_cu_memcpy3d_t params = {.src_memory_type = ARL_CUDA_MEMORY_DEVICE,
                                .dst_memory_type = ARL_CUDA_MEMORY_DEVICE,
                                .src_device = src,
                                .dst_device = dst};
    arl_cu_graph_node_t node;

    if (node_shape(copy, first, &params)) {
        builder->result = builder->device->api->cuGraphAddMemcpyNode(
            &node, builder->graph, NULL, 0, &params, builder->device->context);
        return builder->result == ARL_CUDA_SUCCESS;
    }
    for (int64_t i = 0; i < copy->count[first]; i++) {
        if (!add_nodes(builder, copy, first + 1, src + (uintptr_t)(i * copy->src_stride[first]),
                       dst + (uintptr_t)(i * copy->dst_stride[first]))) {
            return false;
        }
    }
    return true;
}

static arl_status_t
check_nodes(const arl_cuda_device_t *device, const arl_copy_t *copies, int64_t count,
            arl_error_t *err)
{
    int64_t nodes = 0;

    for (int64_t i = 0; i < count && nodes <= NODES_MAX; i++) {
        nodes += count_nodes(&copies[i]);
    }
    if (nodes > NODES_MAX) {
        return arl_error_set(err, ARL_ERR_UNAVAILABLE, "prepare copies",
                             "the copy kernels do not load on device %d (%s), and without them "
                             "these layouts need more than %d separate copies; make the tensors "
                             "contiguous",
                             device->ordinal, device->name, (int)NODES_MAX);
    }
    return ARL_OK;
}

arl_status_t
arl_cuda_graph_build(const arl_cuda_device_t *device, const arl_copy_t *copies, int64_t count,
                     const uintptr_t *bases, arl_cu_graph_exec_t *graph_p, arl_error_t *err)
{
    const arl_cuda_api_t *api = device->api;
    builder_t builder = {.device = device};
    const char *step = "cuGraphCreate";
    arl_cu_graph_exec_t exec = NULL;
    arl_status_t status = check_nodes(device, copies, count, err);

    if (status != ARL_OK) {
        return status;
    }
    builder.result = api->cuGraphCreate(&builder.graph, 0);
    if (builder.result != ARL_CUDA_SUCCESS) {
        builder.graph = NULL;
        goto describe;
    }
    step = "cuGraphAddMemcpyNode";
    for (int64_t i = 0; i < count; i++) {
        if (!add_nodes(&builder, &copies[i], 0,
                       bases[copies[i].alloc] + (uintptr_t)copies[i].src_offset,
                       (uintptr_t)copies[i].dst)) {
            goto describe;
        }
    }
    step = "cuGraphInstantiate";
    builder.result = api->cuGraphInstantiateWithFlags(&exec, builder.graph, 0);

describe:
    if (builder.result != ARL_CUDA_SUCCESS) {
        status = arl_cuda_error_set(api, err, ARL_ERR_SYNC, builder.result, step,
                                    "a graph of %lld copies on device %d (%s)", (long long)count,
                                    device->ordinal, device->name);
    }
    if (builder.graph != NULL) {
        (void)api->cuGraphDestroy(builder.graph); /* the executable has its own copy */
    }
    if (status == ARL_OK) {
        *graph_p = exec;
    }
    return status;
}
