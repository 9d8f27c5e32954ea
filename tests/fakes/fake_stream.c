/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Streams, events, copies, launches and graphs of the fake driver.
 *
 * All work is one list in the order of submission. A piece may run when what CUDA orders before
 * it has run: earlier work of its stream; for the legacy default stream, earlier work of every
 * blocking stream of its device, and the other way round; and when its lag has passed. Of those
 * that may run the youngest runs first, so that an order nobody asked for is never there by luck.
 */
#include "fake_cuda.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

struct arl_cu_stream {
    int ordinal;
    bool blocking; /* synchronises with the legacy default stream */
    bool legacy;
    struct arl_cu_stream *next;
};

struct arl_cu_event {
    uint64_t recorded;
    uint64_t done;
    int references; /* the owner and pending work */
};

typedef struct work {
    struct work *next;
    struct arl_cu_stream *stream;
    int64_t due_ns;
    fake_run_fn run;
    void (*drop)(void *);
    void *context;
} work_t;

static struct arl_cu_stream legacy_streams[FAKE_DEVICES_MAX];
static struct arl_cu_stream *streams; /* those that were created */
static work_t *first_work, **last_link = &first_work;
static pthread_cond_t changed = PTHREAD_COND_INITIALIZER;
static pthread_t worker;
static bool worker_started, held;

static int64_t
now_ns(void)
{
    struct timespec now;

    (void)clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

/* ---- progress, all with the lock held ------------------------------------------------------- */

static bool
ordered_before(const work_t *earlier, const work_t *later)
{
    const struct arl_cu_stream *a = earlier->stream, *b = later->stream;

    if (a == b) {
        return true;
    }
    return a->ordinal == b->ordinal && ((a->legacy && b->blocking) || (b->legacy && a->blocking));
}

static bool
may_run(const work_t *work, int64_t now)
{
    if (work->due_ns > now) {
        return false;
    }
    for (const work_t *earlier = first_work; earlier != work; earlier = earlier->next) {
        if (ordered_before(earlier, work)) {
            return false;
        }
    }
    return true;
}

static void
work_remove(work_t *work)
{
    work_t **link = &first_work;

    while (*link != work) {
        link = &(*link)->next;
    }
    *link = work->next;
    if (work->next == NULL) {
        last_link = link;
    }
    if (work->drop != NULL) {
        work->drop(work->context);
    }
    free(work);
}

/* Runs one piece; false when none could. Pieces that answer "not finished" are passed over. */
static bool
run_one(int64_t now)
{
    work_t *ready[256];
    size_t count = 0;

    for (work_t *work = first_work; work != NULL && count < 256; work = work->next) {
        if (may_run(work, now)) {
            ready[count++] = work;
        }
    }
    while (count > 0) {
        work_t *youngest = ready[--count];

        if (youngest->run(youngest->context)) {
            work_remove(youngest);
            return true;
        }
    }
    return false;
}

static void
progress(void)
{
    bool any = false;

    while (!held && first_work != NULL && run_one(now_ns())) {
        any = true;
    }
    if (any) {
        (void)pthread_cond_broadcast(&changed);
    }
}

static void
wait_a_little(void)
{
    struct timespec until;

    (void)clock_gettime(CLOCK_REALTIME, &until);
    until.tv_nsec += 100000;
    if (until.tv_nsec >= 1000000000) {
        until.tv_sec++;
        until.tv_nsec -= 1000000000;
    }
    (void)pthread_cond_timedwait(&changed, &fake_lock, &until);
}

/* As cuMemFree does: what was submitted is done before the memory goes. */
void
fake_drain(void)
{
    while (first_work != NULL && !held) {
        progress();
        if (first_work != NULL) {
            wait_a_little();
        }
    }
}

static void *
worker_main(void *unused)
{
    (void)unused;
    (void)pthread_mutex_lock(&fake_lock);
    for (;;) {
        progress();
        if (first_work == NULL) {
            (void)pthread_cond_wait(&changed, &fake_lock);
        }
        else {
            wait_a_little();
        }
    }
    return NULL;
}

FAKE_EXPORT void fake_cuda_hold(int on);

/* While held, no stream work runs at all: a GPU that hangs. */
FAKE_EXPORT void
fake_cuda_hold(int on)
{
    (void)pthread_mutex_lock(&fake_lock);
    held = on != 0;
    progress();
    (void)pthread_cond_broadcast(&changed);
    (void)pthread_mutex_unlock(&fake_lock);
}

FAKE_EXPORT long fake_cuda_pending(void);
FAKE_EXPORT long
fake_cuda_pending(void)
{
    long count = 0;

    (void)pthread_mutex_lock(&fake_lock);
    for (const work_t *work = first_work; work != NULL; work = work->next) {
        count++;
    }
    (void)pthread_mutex_unlock(&fake_lock);
    return count;
}

FAKE_EXPORT void fake_cuda_lag(long us);
FAKE_EXPORT void
fake_cuda_lag(long us)
{
    fake_config.lag_us = us;
}

static struct arl_cu_stream *
stream_of(arl_cu_stream_t handle)
{
    const int ordinal = fake_current_ordinal();

    if (handle == NULL || (uintptr_t)handle == 1) { /* both name the legacy default stream */
        legacy_streams[ordinal].ordinal = ordinal;
        legacy_streams[ordinal].legacy = true;
        return &legacy_streams[ordinal];
    }
    for (struct arl_cu_stream *stream = streams; stream != NULL; stream = stream->next) {
        if (stream == handle) {
            return stream->ordinal == ordinal ? stream : NULL;
        }
    }
    return NULL;
}

static int
push_locked(struct arl_cu_stream *stream, fake_run_fn run, void (*drop)(void *), void *context)
{
    work_t *work = calloc(1, sizeof(*work));

    if (work == NULL) {
        return ARL_CUDA_ERROR_OUT_OF_MEMORY;
    }
    work->stream = stream;
    work->due_ns = now_ns() + fake_config.lag_us * 1000;
    work->run = run;
    work->drop = drop;
    work->context = context;
    *last_link = work;
    last_link = &work->next;
    progress();
    if (first_work != NULL && !worker_started) {
        worker_started = pthread_create(&worker, NULL, worker_main, NULL) == 0;
        if (worker_started) {
            (void)pthread_detach(worker);
        }
    }
    (void)pthread_cond_broadcast(&changed);
    return 0;
}

/* Takes `context`: on failure it is dropped here. */
FAKE_EXPORT int
fake_stream_push(arl_cu_stream_t handle, fake_run_fn run, void (*drop)(void *), void *context)
{
    struct arl_cu_stream *stream;
    int code = FAKE_ERROR_INVALID_HANDLE;

    (void)pthread_mutex_lock(&fake_lock);
    stream = fake_current() == NULL ? NULL : stream_of(handle);
    if (stream != NULL) {
        code = push_locked(stream, run, drop, context);
    }
    (void)pthread_mutex_unlock(&fake_lock);
    if (code != 0 && drop != NULL) {
        drop(context);
    }
    return code;
}

static bool
stream_idle(const struct arl_cu_stream *stream)
{
    for (const work_t *work = first_work; work != NULL; work = work->next) {
        if (work->stream == stream) {
            return false;
        }
    }
    return true;
}

/* ---- streams -------------------------------------------------------------------------------- */

FAKE_EXPORT arl_cuStreamCreate_fn cuStreamCreate;
FAKE_EXPORT arl_cu_result_t
cuStreamCreate(arl_cu_stream_t *stream, unsigned int flags)
{
    struct arl_cu_stream *made;

    FAKE_FAIL();
    NEED_CONTEXT();
    made = calloc(1, sizeof(*made));
    if (made == NULL) {
        return ARL_CUDA_ERROR_OUT_OF_MEMORY;
    }
    made->ordinal = fake_current_ordinal();
    made->blocking = (flags & ARL_CUDA_STREAM_NON_BLOCKING) == 0;
    (void)pthread_mutex_lock(&fake_lock);
    made->next = streams;
    streams = made;
    fake_live[FAKE_STREAMS]++;
    (void)pthread_mutex_unlock(&fake_lock);
    *stream = made;
    return 0;
}

/* The real one returns at once and lets the work finish; here the caller is told that it left
 * work behind, which none of our code should do. */
FAKE_EXPORT arl_cuStreamDestroy_v2_fn cuStreamDestroy_v2;
FAKE_EXPORT arl_cu_result_t
cuStreamDestroy_v2(arl_cu_stream_t stream)
{
    const int failed = fake_fail_point(__func__);
    struct arl_cu_stream **link = &streams;

    (void)pthread_mutex_lock(&fake_lock);
    while (*link != NULL && *link != stream) {
        link = &(*link)->next;
    }
    if (*link == NULL) {
        fake_misuse("stream %p destroyed twice", (void *)stream);
        (void)pthread_mutex_unlock(&fake_lock);
        return FAKE_ERROR_INVALID_HANDLE;
    }
    progress();
    if (stream_idle(stream)) {
        *link = stream->next;
        free(stream);
    }
    else { /* kept for its work, and out of the count */
        *link = stream->next;
    }
    fake_live[FAKE_STREAMS]--;
    (void)pthread_mutex_unlock(&fake_lock);
    return failed;
}

FAKE_EXPORT arl_cuStreamQuery_fn cuStreamQuery;
FAKE_EXPORT arl_cu_result_t
cuStreamQuery(arl_cu_stream_t handle)
{
    struct arl_cu_stream *stream;
    int code;

    FAKE_FAIL();
    NEED_CONTEXT();
    (void)pthread_mutex_lock(&fake_lock);
    stream = stream_of(handle);
    progress();
    code = stream == NULL        ? FAKE_ERROR_INVALID_HANDLE
           : stream_idle(stream) ? 0
                                 : ARL_CUDA_ERROR_NOT_READY;
    (void)pthread_mutex_unlock(&fake_lock);
    return code;
}

FAKE_EXPORT arl_cuStreamSynchronize_fn cuStreamSynchronize;
FAKE_EXPORT arl_cu_result_t
cuStreamSynchronize(arl_cu_stream_t handle)
{
    struct arl_cu_stream *stream;

    FAKE_FAIL();
    NEED_CONTEXT();
    (void)pthread_mutex_lock(&fake_lock);
    stream = stream_of(handle);
    for (;;) {
        progress();
        if (stream == NULL || stream_idle(stream)) {
            break;
        }
        wait_a_little();
    }
    (void)pthread_mutex_unlock(&fake_lock);
    return stream == NULL ? FAKE_ERROR_INVALID_HANDLE : 0;
}

/* ---- events --------------------------------------------------------------------------------- */

typedef struct event_work {
    struct arl_cu_event *event;
    uint64_t generation;
} event_work_t;

static void
event_unreference(struct arl_cu_event *event)
{
    if (--event->references == 0) {
        free(event);
    }
}

static void
event_work_drop(void *context)
{
    event_work_t *work = context;

    event_unreference(work->event);
    free(work);
}

static bool
event_complete(void *context)
{
    event_work_t *work = context;

    work->event->done = work->generation;
    return true;
}

static bool
event_reached(void *context)
{
    const event_work_t *work = context;

    return work->event->done >= work->generation;
}

static int
event_push(struct arl_cu_event *event, arl_cu_stream_t handle, fake_run_fn run)
{
    event_work_t *work = calloc(1, sizeof(*work));
    struct arl_cu_stream *stream;
    int code = FAKE_ERROR_INVALID_HANDLE;

    if (work == NULL) {
        return ARL_CUDA_ERROR_OUT_OF_MEMORY;
    }
    (void)pthread_mutex_lock(&fake_lock);
    stream = stream_of(handle);
    if (stream != NULL) {
        work->event = event;
        work->generation = run == event_complete ? ++event->recorded : event->recorded;
        event->references++;
        code = push_locked(stream, run, event_work_drop, work);
    }
    (void)pthread_mutex_unlock(&fake_lock);
    if (code != 0) {
        free(work);
    }
    return code;
}

FAKE_EXPORT arl_cuStreamWaitEvent_fn cuStreamWaitEvent;
FAKE_EXPORT arl_cu_result_t
cuStreamWaitEvent(arl_cu_stream_t stream, arl_cu_event_t event, unsigned int flags)
{
    FAKE_FAIL();
    NEED_CONTEXT();
    return flags != 0 || event == NULL ? ARL_CUDA_ERROR_INVALID_VALUE
                                       : event_push(event, stream, event_reached);
}

FAKE_EXPORT arl_cuEventCreate_fn cuEventCreate;
FAKE_EXPORT arl_cu_result_t
cuEventCreate(arl_cu_event_t *event, unsigned int flags)
{
    (void)flags;
    FAKE_FAIL();
    NEED_CONTEXT();
    *event = calloc(1, sizeof(**event));
    if (*event == NULL) {
        return ARL_CUDA_ERROR_OUT_OF_MEMORY;
    }
    (*event)->references = 1;
    (void)pthread_mutex_lock(&fake_lock);
    fake_live[FAKE_EVENTS]++;
    (void)pthread_mutex_unlock(&fake_lock);
    return 0;
}

FAKE_EXPORT arl_cuEventDestroy_v2_fn cuEventDestroy_v2;
FAKE_EXPORT arl_cu_result_t
cuEventDestroy_v2(arl_cu_event_t event)
{
    const int failed = fake_fail_point(__func__);

    if (event == NULL) {
        return ARL_CUDA_ERROR_INVALID_VALUE;
    }
    (void)pthread_mutex_lock(&fake_lock);
    event_unreference(event);
    fake_live[FAKE_EVENTS]--;
    (void)pthread_mutex_unlock(&fake_lock);
    return failed;
}

FAKE_EXPORT arl_cuEventRecord_fn cuEventRecord;
FAKE_EXPORT arl_cu_result_t
cuEventRecord(arl_cu_event_t event, arl_cu_stream_t stream)
{
    FAKE_FAIL();
    NEED_CONTEXT();
    return event == NULL ? ARL_CUDA_ERROR_INVALID_VALUE : event_push(event, stream, event_complete);
}

FAKE_EXPORT arl_cuEventQuery_fn cuEventQuery;
FAKE_EXPORT arl_cu_result_t
cuEventQuery(arl_cu_event_t event)
{
    int code;

    FAKE_FAIL();
    (void)pthread_mutex_lock(&fake_lock);
    progress();
    code = event->done >= event->recorded ? 0 : ARL_CUDA_ERROR_NOT_READY;
    (void)pthread_mutex_unlock(&fake_lock);
    return code;
}

FAKE_EXPORT arl_cuEventSynchronize_fn cuEventSynchronize;
FAKE_EXPORT arl_cu_result_t
cuEventSynchronize(arl_cu_event_t event)
{
    FAKE_FAIL();
    (void)pthread_mutex_lock(&fake_lock);
    for (;;) {
        progress();
        if (event->done >= event->recorded) {
            break;
        }
        wait_a_little();
    }
    (void)pthread_mutex_unlock(&fake_lock);
    return 0;
}

/* ---- copies --------------------------------------------------------------------------------- */

typedef struct copy_work {
    uintptr_t dst, src;
    size_t width, height, depth;
    size_t dst_pitch, dst_slice, src_pitch, src_slice;
} copy_work_t; /* followed by pageable source bytes, taken at submission as the driver does */

static bool
copy_run(void *context)
{
    const copy_work_t *work = context;

    for (size_t z = 0; z < work->depth; z++) {
        for (size_t y = 0; y < work->height; y++) {
            memcpy((char *)work->dst + z * work->dst_slice + y * work->dst_pitch,
                   (const char *)work->src + z * work->src_slice + y * work->src_pitch,
                   work->width);
        }
    }
    return true;
}

/* Device memory must be live; other addresses are taken for pageable host memory. */
static bool
range_usable(uintptr_t pointer, size_t size, bool *pageable)
{
    const fake_block_t *block = fake_block_find(pointer, size);

    *pageable = block == NULL;
    if (block == NULL && fake_was_freed(pointer)) {
        fake_misuse("copy touches 0x%lx, which was freed or unmapped", (unsigned long)pointer);
        return false;
    }
    return true;
}

FAKE_EXPORT arl_cuMemcpyAsync_fn cuMemcpyAsync;
FAKE_EXPORT arl_cu_result_t
cuMemcpyAsync(arl_cu_ptr_t dst, arl_cu_ptr_t src, size_t size, arl_cu_stream_t stream)
{
    bool src_pageable, dst_pageable, usable;
    copy_work_t *work;

    FAKE_FAIL();
    NEED_CONTEXT();
    (void)pthread_mutex_lock(&fake_lock);
    usable = range_usable(src, size, &src_pageable) && range_usable(dst, size, &dst_pageable);
    (void)pthread_mutex_unlock(&fake_lock);
    if (!usable) {
        return ARL_CUDA_ERROR_INVALID_VALUE;
    }
    work = calloc(1, sizeof(*work) + (src_pageable ? size : 0));
    if (work == NULL) {
        return ARL_CUDA_ERROR_OUT_OF_MEMORY;
    }
    work->dst = dst;
    work->src = src;
    work->width = size;
    work->height = work->depth = 1;
    if (src_pageable) {
        work->src = (uintptr_t)(work + 1);
        memcpy(work + 1, (const void *)src, size);
    }
    return fake_stream_push(stream, copy_run, free, work);
}

/* ---- launches ------------------------------------------------------------------------------- */

FAKE_EXPORT arl_cuLaunchKernel_fn cuLaunchKernel;
FAKE_EXPORT arl_cu_result_t
cuLaunchKernel(arl_cu_function_t function, unsigned int grid_x, unsigned int grid_y,
               unsigned int grid_z, unsigned int block_x, unsigned int block_y,
               unsigned int block_z, unsigned int shared_bytes, arl_cu_stream_t stream,
               void **params, void **extra)
{
    void *launch;

    FAKE_FAIL();
    NEED_CONTEXT();
    if (function == NULL || grid_x == 0 || block_x == 0 || block_x > 1024 || grid_y != 1 ||
        grid_z != 1 || block_y != 1 || block_z != 1 || shared_bytes > 48 * 1024 || extra != NULL) {
        return ARL_CUDA_ERROR_INVALID_VALUE;
    }
    launch = fake_kernel_prepare((int)(uintptr_t)function - 1, grid_x, block_x, params);
    if (launch == NULL) {
        return ARL_CUDA_ERROR_OUT_OF_MEMORY;
    }
    return fake_stream_push(stream, fake_kernel_run, free, launch);
}

/* ---- graphs: memcpy nodes without dependencies, all that is used ---------------------------- */

struct arl_cu_graph {
    copy_work_t *nodes;
    size_t count, room;
    int references; /* graph, executables, pending launches */
};

static void
graph_unreference(struct arl_cu_graph *graph)
{
    if (--graph->references == 0) {
        free(graph->nodes);
        free(graph);
    }
}

FAKE_EXPORT arl_cuGraphCreate_fn cuGraphCreate;
FAKE_EXPORT arl_cu_result_t
cuGraphCreate(arl_cu_graph_t *graph, unsigned int flags)
{
    FAKE_FAIL();
    if (flags != 0) {
        return ARL_CUDA_ERROR_INVALID_VALUE;
    }
    *graph = calloc(1, sizeof(**graph));
    if (*graph == NULL) {
        return ARL_CUDA_ERROR_OUT_OF_MEMORY;
    }
    (*graph)->references = 1;
    fake_live[FAKE_GRAPHS]++;
    return 0;
}

FAKE_EXPORT arl_cuGraphAddMemcpyNode_fn cuGraphAddMemcpyNode;
FAKE_EXPORT arl_cu_result_t
cuGraphAddMemcpyNode(arl_cu_graph_node_t *node, arl_cu_graph_t graph,
                     const arl_cu_graph_node_t *dependencies, size_t count,
                     const arl_cu_memcpy3d_t *copy, arl_cu_context_t context)
{
    copy_work_t *nodes, *added;
    bool pageable;

    (void)dependencies;
    FAKE_FAIL();
    if (count != 0 || context == NULL || copy->src_memory_type != ARL_CUDA_MEMORY_DEVICE ||
        copy->dst_memory_type != ARL_CUDA_MEMORY_DEVICE || copy->width == 0 || copy->height == 0 ||
        copy->depth == 0 || (copy->height > 1 && copy->width > copy->src_pitch) ||
        (copy->height > 1 && copy->width > copy->dst_pitch) ||
        (copy->depth > 1 && copy->height > copy->src_height) ||
        (copy->depth > 1 && copy->height > copy->dst_height)) {
        return ARL_CUDA_ERROR_INVALID_VALUE;
    }
    (void)pthread_mutex_lock(&fake_lock);
    if (!range_usable(copy->src_device, 1, &pageable) || pageable ||
        !range_usable(copy->dst_device, 1, &pageable) || pageable) {
        (void)pthread_mutex_unlock(&fake_lock);
        return ARL_CUDA_ERROR_INVALID_VALUE;
    }
    (void)pthread_mutex_unlock(&fake_lock);
    if (graph->count == graph->room) {
        nodes = realloc(graph->nodes, (graph->room * 2 + 16) * sizeof(*nodes));
        if (nodes == NULL) {
            return ARL_CUDA_ERROR_OUT_OF_MEMORY;
        }
        graph->nodes = nodes;
        graph->room = graph->room * 2 + 16;
    }
    added = &graph->nodes[graph->count++];
    memset(added, 0, sizeof(*added));
    added->dst = copy->dst_device;
    added->src = copy->src_device;
    added->width = copy->width;
    added->height = copy->height;
    added->depth = copy->depth;
    added->src_pitch = copy->src_pitch;
    added->dst_pitch = copy->dst_pitch;
    added->src_slice = copy->src_pitch * copy->src_height;
    added->dst_slice = copy->dst_pitch * copy->dst_height;
    *node = (arl_cu_graph_node_t)(uintptr_t)graph->count;
    return 0;
}

FAKE_EXPORT arl_cuGraphInstantiateWithFlags_fn cuGraphInstantiateWithFlags;
FAKE_EXPORT arl_cu_result_t
cuGraphInstantiateWithFlags(arl_cu_graph_exec_t *exec, arl_cu_graph_t graph,
                            unsigned long long flags)
{
    FAKE_FAIL();
    NEED_CONTEXT();
    if (flags != 0) {
        return ARL_CUDA_ERROR_INVALID_VALUE;
    }
    graph->references++;
    fake_live[FAKE_GRAPHS]++;
    *exec = (arl_cu_graph_exec_t)graph;
    return 0;
}

static bool
graph_run(void *context)
{
    const struct arl_cu_graph *graph = context;

    for (size_t i = graph->count; i > 0; i--) { /* no order among nodes was asked for */
        (void)copy_run(&graph->nodes[i - 1]);
    }
    return true;
}

static void
graph_drop(void *context)
{
    graph_unreference(context);
}

FAKE_EXPORT arl_cuGraphLaunch_fn cuGraphLaunch;
FAKE_EXPORT arl_cu_result_t
cuGraphLaunch(arl_cu_graph_exec_t exec, arl_cu_stream_t stream)
{
    struct arl_cu_graph *graph = (struct arl_cu_graph *)exec;

    FAKE_FAIL();
    NEED_CONTEXT();
    graph->references++;
    return fake_stream_push(stream, graph_run, graph_drop, graph);
}

static arl_cu_result_t
graph_destroy(struct arl_cu_graph *graph, int failed)
{
    (void)pthread_mutex_lock(&fake_lock);
    graph_unreference(graph);
    fake_live[FAKE_GRAPHS]--;
    (void)pthread_mutex_unlock(&fake_lock);
    return failed;
}

FAKE_EXPORT arl_cuGraphExecDestroy_fn cuGraphExecDestroy;
FAKE_EXPORT arl_cu_result_t
cuGraphExecDestroy(arl_cu_graph_exec_t exec)
{
    return graph_destroy((struct arl_cu_graph *)exec, fake_fail_point(__func__));
}

FAKE_EXPORT arl_cuGraphDestroy_fn cuGraphDestroy;
FAKE_EXPORT arl_cu_result_t
cuGraphDestroy(arl_cu_graph_t graph)
{
    return graph_destroy(graph, fake_fail_point(__func__));
}
