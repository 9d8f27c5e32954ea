/* SPDX-License-Identifier: Apache-2.0 */
/*
 * NCCL without a GPU: ranks are real processes, bytes go through shared memory in pieces, and
 * work runs on the fake driver's streams. What the real one does not notice, this one does not
 * either: a rank that never comes, one that died, counts that differ, all wait for ever, until
 * the communicator is aborted. FAKE_NCCL_REPORT_DEATH=1 makes a dead rank a remote error, as the
 * real one does when a socket was involved. FAKE_NCCL_IN_PROGRESS=1 launches in the background,
 * as the real one does with a communicator that does not block: an operation is on its stream
 * only when ncclCommGetAsyncError has said so.
 */
#include "fake_cuda.h"
#include "transport/nccl_api.h"

#include <fcntl.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

enum { RANKS_MAX = 8, CHANNEL_BYTES = 1 << 16, OPS_MAX = 4096, ID_MAGIC = 0x4e43434c };

/* From one rank to another. */
typedef struct channel {
    _Atomic uint64_t written;
    _Atomic uint64_t read;
    char data[CHANNEL_BYTES];
} channel_t;

/* What the ranks of one communicator share. */
typedef struct shared {
    _Atomic int nranks;
    struct {
        _Atomic int pid;
        _Atomic int physical; /* device + 1; 0: has not come */
        _Atomic int finalized;
    } ranks[RANKS_MAX];
    channel_t channels[RANKS_MAX][RANKS_MAX];
} shared_t;

typedef struct unique {
    uint32_t magic;
    char name[64];
} unique_t;

struct arl_nccl_comm {
    shared_t *shared;
    int rank;
    int nranks;
    int ordinal;
    bool aborted;
    bool finalizing;
    bool ready;
    arl_nccl_result_t error;
    int pending;             /* pieces of stream work */
    struct launch *deferred; /* what is being launched in the background */
    arl_cu_stream_t deferred_stream;
    int deferred_polls;
    int references; /* the owner and the pending work */
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER; /* taken inside the driver's */
static long live_comms;
static _Atomic long sent_bytes; /* as sender or as root, counted once however many receive */
static int injected;            /* asynchronous error for whoever asks next */
static _Thread_local char last_error[256];

static arl_nccl_result_t
fail(arl_nccl_result_t result, const char *format, ...)
{
    va_list args;

    va_start(args, format);
    (void)vsnprintf(last_error, sizeof(last_error), format, args);
    va_end(args);
    return result;
}

/* The driver's failure points, with a code that NCCL has. */
#define NCCL_FAIL()                                                                                \
    do {                                                                                           \
        const int code_ = fake_fail_point(__func__);                                               \
        if (code_ != 0) {                                                                          \
            return fail(code_ < 8 ? code_ : ARL_NCCL_INTERNAL_ERROR, "%s was told to fail",        \
                        __func__);                                                                 \
        }                                                                                          \
    } while (0)

FAKE_EXPORT long fake_nccl_live(void);
FAKE_EXPORT long
fake_nccl_live(void)
{
    return live_comms;
}

FAKE_EXPORT long fake_nccl_sent(void);
FAKE_EXPORT long
fake_nccl_sent(void)
{
    return atomic_load(&sent_bytes);
}

FAKE_EXPORT void fake_nccl_inject(int error);
FAKE_EXPORT void
fake_nccl_inject(int error)
{
    injected = error;
}

/* ---- identity ------------------------------------------------------------------------------- */

FAKE_EXPORT arl_ncclGetVersion_fn ncclGetVersion;
FAKE_EXPORT arl_nccl_result_t
ncclGetVersion(int *version)
{
    const char *text = getenv("FAKE_NCCL_VERSION");

    NCCL_FAIL();
    *version = text == NULL ? 22803 : atoi(text);
    return ARL_NCCL_SUCCESS;
}

FAKE_EXPORT arl_ncclGetErrorString_fn ncclGetErrorString;
FAKE_EXPORT const char *
ncclGetErrorString(arl_nccl_result_t result)
{
    static const char *const texts[] = {"no error",
                                        "unhandled cuda error",
                                        "unhandled system error",
                                        "internal error",
                                        "invalid argument",
                                        "invalid usage",
                                        "remote process exited or there was a network error",
                                        "NCCL operation in progress"};

    return result >= 0 && result < 8 ? texts[result] : "unknown result code";
}

FAKE_EXPORT arl_ncclGetLastError_fn ncclGetLastError;
FAKE_EXPORT const char *
ncclGetLastError(arl_nccl_comm_t comm)
{
    (void)comm;
    return last_error;
}

static shared_t *
map_shared(const char *name, bool create)
{
    void *address;
    int fd = shm_open(name, O_RDWR | O_CLOEXEC | (create ? O_CREAT | O_EXCL : 0), 0600);

    if (fd < 0) {
        return NULL;
    }
    if (create && ftruncate(fd, (off_t)sizeof(shared_t)) < 0) {
        (void)close(fd);
        return NULL;
    }
    address = mmap(NULL, sizeof(shared_t), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    (void)close(fd);
    return address == MAP_FAILED ? NULL : address;
}

FAKE_EXPORT arl_ncclGetUniqueId_fn ncclGetUniqueId;
FAKE_EXPORT arl_nccl_result_t
ncclGetUniqueId(arl_nccl_id_t *id)
{
    unique_t unique = {.magic = ID_MAGIC};
    shared_t *shared;

    NCCL_FAIL();
    (void)snprintf(unique.name, sizeof(unique.name), "/%s-nccl-%llx", fake_session(),
                   (unsigned long long)fake_serial());
    shared = map_shared(unique.name, true);
    if (shared == NULL) {
        return fail(ARL_NCCL_SYSTEM_ERROR, "no shared memory for %s", unique.name);
    }
    (void)munmap(shared, sizeof(*shared));
    memset(id, 0, sizeof(*id));
    memcpy(id, &unique, sizeof(unique));
    return ARL_NCCL_SUCCESS;
}

/* ---- communicators -------------------------------------------------------------------------- */

static void
comm_unreference(arl_nccl_comm_t comm) /* with `lock` held */
{
    if (--comm->references == 0) {
        (void)munmap(comm->shared, sizeof(*comm->shared));
        free(comm);
    }
}

FAKE_EXPORT arl_ncclCommInitRankConfig_fn ncclCommInitRankConfig;
FAKE_EXPORT arl_nccl_result_t
ncclCommInitRankConfig(arl_nccl_comm_t *comm_p, int nranks, arl_nccl_id_t id, int rank,
                       arl_nccl_config_t *config)
{
    unique_t unique;
    arl_nccl_comm_t comm;

    NCCL_FAIL();
    memcpy(&unique, &id, sizeof(unique));
    unique.name[sizeof(unique.name) - 1] = '\0';
    if (config == NULL || config->magic != ARL_NCCL_CONFIG_MAGIC || config->blocking != 0) {
        return fail(ARL_NCCL_INVALID_ARGUMENT, "configuration is not initialised or blocks");
    }
    if (nranks < 1 || nranks > RANKS_MAX || rank < 0 || rank >= nranks) {
        return fail(ARL_NCCL_INVALID_ARGUMENT, "rank %d of %d", rank, nranks);
    }
    if (unique.magic != ID_MAGIC) {
        return fail(ARL_NCCL_INVALID_ARGUMENT, "unique id is damaged");
    }
    if (fake_current_physical() < 0) {
        return fail(ARL_NCCL_UNHANDLED_CUDA_ERROR, "no device is current");
    }
    comm = calloc(1, sizeof(*comm));
    if (comm == NULL) {
        return ARL_NCCL_SYSTEM_ERROR;
    }
    comm->shared = map_shared(unique.name, false);
    if (comm->shared == NULL) {
        free(comm);
        return fail(ARL_NCCL_SYSTEM_ERROR, "the root of this communicator is gone");
    }
    comm->rank = rank;
    comm->nranks = nranks;
    comm->ordinal = fake_current_ordinal();
    comm->references = 1;
    atomic_store(&comm->shared->nranks, nranks);
    atomic_store(&comm->shared->ranks[rank].pid, (int)getpid());
    atomic_store(&comm->shared->ranks[rank].physical, fake_current_physical() + 1);
    (void)pthread_mutex_lock(&lock);
    live_comms++;
    (void)pthread_mutex_unlock(&lock);
    *comm_p = comm;
    return ARL_NCCL_IN_PROGRESS;
}

/* All have come, and no two to one device. */
static arl_nccl_result_t
comm_bootstrap(arl_nccl_comm_t comm)
{
    for (int i = 0; i < comm->nranks; i++) {
        const int device = atomic_load(&comm->shared->ranks[i].physical);

        if (device == 0) {
            return ARL_NCCL_IN_PROGRESS;
        }
        for (int j = 0; j < i; j++) {
            if (atomic_load(&comm->shared->ranks[j].physical) == device) {
                return fail(ARL_NCCL_INVALID_USAGE,
                            "Duplicate GPU detected : rank %d and rank %d both on CUDA device %d",
                            i, j, device - 1);
            }
        }
    }
    comm->ready = true;
    return ARL_NCCL_SUCCESS;
}

static bool
someone_died(const shared_t *shared, int nranks)
{
    const char *report = getenv("FAKE_NCCL_REPORT_DEATH");

    for (int i = 0; i < nranks && report != NULL && report[0] == '1'; i++) {
        const int pid = atomic_load(&((shared_t *)shared)->ranks[i].pid);

        if (pid != 0 && kill(pid, 0) != 0) {
            return true;
        }
    }
    return false;
}

/* Two more questions, and it is on its stream. */
static arl_nccl_result_t deferred_launch(arl_nccl_comm_t comm);
static void deferred_drop(arl_nccl_comm_t comm);

static bool
all_finalized(arl_nccl_comm_t comm)
{
    for (int i = 0; i < comm->nranks; i++) {
        if (atomic_load(&comm->shared->ranks[i].finalized) == 0) {
            return false;
        }
    }
    return true;
}

FAKE_EXPORT arl_ncclCommGetAsyncError_fn ncclCommGetAsyncError;
FAKE_EXPORT arl_nccl_result_t
ncclCommGetAsyncError(arl_nccl_comm_t comm, arl_nccl_result_t *error)
{
    NCCL_FAIL();
    if (injected != 0) {
        comm->error = injected;
        injected = 0;
        (void)fail(comm->error, "an error was injected");
    }
    if (comm->error == ARL_NCCL_SUCCESS && someone_died(comm->shared, comm->nranks)) {
        comm->error =
            fail(ARL_NCCL_REMOTE_ERROR, "socketProgress: Connection closed by remote peer");
    }
    if (comm->error == ARL_NCCL_SUCCESS && !comm->ready) {
        const arl_nccl_result_t result = comm_bootstrap(comm);

        comm->error = result == ARL_NCCL_IN_PROGRESS ? ARL_NCCL_SUCCESS : result;
        *error = result;
        return ARL_NCCL_SUCCESS;
    }
    if (comm->error == ARL_NCCL_SUCCESS && comm->deferred != NULL) {
        comm->error = deferred_launch(comm);
        if (comm->error == ARL_NCCL_IN_PROGRESS) {
            comm->error = ARL_NCCL_SUCCESS;
            *error = ARL_NCCL_IN_PROGRESS;
            return ARL_NCCL_SUCCESS;
        }
    }
    *error = comm->error;
    if (comm->error == ARL_NCCL_SUCCESS && comm->finalizing &&
        (comm->pending > 0 || !all_finalized(comm))) {
        *error = ARL_NCCL_IN_PROGRESS;
    }
    return ARL_NCCL_SUCCESS;
}

FAKE_EXPORT arl_ncclCommCuDevice_fn ncclCommCuDevice;
FAKE_EXPORT arl_nccl_result_t
ncclCommCuDevice(const arl_nccl_comm_t comm, int *device)
{
    NCCL_FAIL();
    *device = comm->ordinal;
    return ARL_NCCL_SUCCESS;
}

FAKE_EXPORT arl_ncclCommFinalize_fn ncclCommFinalize;
FAKE_EXPORT arl_nccl_result_t
ncclCommFinalize(arl_nccl_comm_t comm)
{
    NCCL_FAIL();
    if (comm->finalizing) {
        return fail(ARL_NCCL_INVALID_USAGE, "finalized twice");
    }
    comm->finalizing = true;
    atomic_store(&comm->shared->ranks[comm->rank].finalized, 1);
    return ARL_NCCL_IN_PROGRESS;
}

static void
comm_end(arl_nccl_comm_t comm)
{
    deferred_drop(comm);
    (void)pthread_mutex_lock(&lock);
    comm->aborted = true; /* pending work ends at its next turn */
    live_comms--;
    comm_unreference(comm);
    (void)pthread_mutex_unlock(&lock);
}

FAKE_EXPORT arl_ncclCommAbort_fn ncclCommAbort;
FAKE_EXPORT arl_nccl_result_t
ncclCommAbort(arl_nccl_comm_t comm)
{
    const int failed = fake_fail_point(__func__);

    comm_end(comm);
    return failed != 0 ? ARL_NCCL_INTERNAL_ERROR : ARL_NCCL_SUCCESS;
}

/* ---- transfers ------------------------------------------------------------------------------ */

/* One direction of one transfer: bytes into or out of a channel. */
typedef struct transfer {
    channel_t *channel;
    char *buffer;
    size_t size, done;
    bool send;
} transfer_t;

/* What goes onto a stream in one piece: everything of a group, in progress at the same time. */
typedef struct launch {
    arl_nccl_comm_t comm;
    size_t count;
    transfer_t transfers[];
} launch_t;

static void
transfer_move(transfer_t *transfer)
{
    channel_t *channel = transfer->channel;
    const uint64_t written = atomic_load(&channel->written), taken = atomic_load(&channel->read);
    const size_t there = (size_t)(written - taken);
    const uint64_t position = transfer->send ? written : taken;
    const size_t at = (size_t)(position % CHANNEL_BYTES);
    size_t size = transfer->send ? CHANNEL_BYTES - there : there;

    size = size < transfer->size - transfer->done ? size : transfer->size - transfer->done;
    size = size < CHANNEL_BYTES - at ? size : CHANNEL_BYTES - at;
    if (transfer->send) {
        memcpy(channel->data + at, transfer->buffer + transfer->done, size);
        atomic_store(&channel->written, written + size);
    }
    else {
        memcpy(transfer->buffer + transfer->done, channel->data + at, size);
        atomic_store(&channel->read, taken + size);
    }
    transfer->done += size;
}

static bool
launch_run(void *context)
{
    launch_t *launch = context;
    bool finished = true;

    if (launch->comm->aborted || launch->comm->error != ARL_NCCL_SUCCESS) {
        return launch->comm->aborted; /* an error alone ends nothing: the kernel still spins */
    }
    for (size_t i = 0; i < launch->count; i++) {
        transfer_t *transfer = &launch->transfers[i];

        for (size_t before = SIZE_MAX;
             before != transfer->done && transfer->done < transfer->size;) {
            before = transfer->done;
            transfer_move(transfer);
        }
        finished = finished && transfer->done == transfer->size;
    }
    return finished;
}

static void
launch_drop(void *context)
{
    launch_t *launch = context;

    (void)pthread_mutex_lock(&lock);
    launch->comm->pending--;
    comm_unreference(launch->comm);
    (void)pthread_mutex_unlock(&lock);
    free(launch);
}

/* A group of this thread; one communicator and one stream at a time, all that is used. */
static _Thread_local int group_depth;
static _Thread_local arl_nccl_comm_t group_comm;
static _Thread_local arl_cu_stream_t group_stream;
static _Thread_local size_t group_count;
static _Thread_local transfer_t *group_transfers;

static arl_nccl_result_t
launch_push(launch_t *launch, arl_cu_stream_t stream)
{
    const int code = fake_stream_push(stream, launch_run, launch_drop, launch);

    return code == 0 ? ARL_NCCL_SUCCESS
                     : fail(ARL_NCCL_UNHANDLED_CUDA_ERROR, "Cuda failure %d", code);
}

static arl_nccl_result_t
group_flush(void)
{
    const char *background;
    launch_t *launch;

    if (group_count == 0) {
        return ARL_NCCL_SUCCESS;
    }
    launch = calloc(1, sizeof(*launch) + group_count * sizeof(transfer_t));
    if (launch == NULL) {
        return ARL_NCCL_SYSTEM_ERROR;
    }
    launch->comm = group_comm;
    launch->count = group_count;
    memcpy(launch->transfers, group_transfers, group_count * sizeof(transfer_t));
    group_count = 0;
    (void)pthread_mutex_lock(&lock);
    launch->comm->pending++;
    launch->comm->references++;
    (void)pthread_mutex_unlock(&lock);
    background = getenv("FAKE_NCCL_IN_PROGRESS");
    if (background != NULL && background[0] == '1') {
        launch->comm->deferred = launch;
        launch->comm->deferred_stream = group_stream;
        launch->comm->deferred_polls = 2;
        return ARL_NCCL_IN_PROGRESS;
    }
    return launch_push(launch, group_stream);
}

static arl_nccl_result_t
deferred_launch(arl_nccl_comm_t comm)
{
    launch_t *launch = comm->deferred;

    if (comm->deferred_polls-- > 0) {
        return ARL_NCCL_IN_PROGRESS;
    }
    comm->deferred = NULL;
    return launch_push(launch, comm->deferred_stream);
}

static void
deferred_drop(arl_nccl_comm_t comm)
{
    if (comm->deferred != NULL) {
        launch_drop(comm->deferred);
        comm->deferred = NULL;
    }
}

static arl_nccl_result_t
group_add(arl_nccl_comm_t comm, arl_cu_stream_t stream, const void *buffer, size_t size, int from,
          int to)
{
    transfer_t *transfer;

    if (group_transfers == NULL) {
        group_transfers = calloc(OPS_MAX, sizeof(*group_transfers));
    }
    if (group_transfers == NULL || group_count == OPS_MAX) {
        return fail(ARL_NCCL_SYSTEM_ERROR, "too many operations in a group");
    }
    if (group_count > 0 && (group_comm != comm || group_stream != stream)) {
        return fail(ARL_NCCL_INVALID_USAGE, "the fake groups one communicator and one stream");
    }
    group_comm = comm;
    group_stream = stream;
    transfer = &group_transfers[group_count++];
    transfer->channel = &comm->shared->channels[from][to];
    transfer->buffer = (char *)buffer;
    transfer->size = size;
    transfer->done = 0;
    transfer->send = from == comm->rank;
    return ARL_NCCL_SUCCESS;
}

/* Sizes of ncclInt8 to ncclBfloat16. */
static size_t
type_size(arl_nccl_type_t type)
{
    static const size_t sizes[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2};

    return type >= 0 && type < 10 ? sizes[type] : 0;
}

static arl_nccl_result_t
check_transfer(arl_nccl_comm_t comm, const void *buffer, size_t size, arl_nccl_type_t type,
               int peer)
{
    if (comm == NULL || !comm->ready) {
        return fail(ARL_NCCL_INVALID_USAGE, "the communicator is not initialised");
    }
    if (comm->error != ARL_NCCL_SUCCESS || comm->finalizing) {
        return fail(ARL_NCCL_INVALID_USAGE, "the communicator has failed or is finalized");
    }
    if (comm->deferred != NULL) {
        return fail(ARL_NCCL_INVALID_ARGUMENT,
                    "the communicator is used before its previous operation has succeeded");
    }
    if (peer < 0 || peer >= comm->nranks || type_size(type) == 0) {
        return fail(ARL_NCCL_INVALID_ARGUMENT, "peer %d, type %d", peer, (int)type);
    }
    if (fake_current_ordinal() != comm->ordinal) {
        return fail(ARL_NCCL_INVALID_USAGE, "device %d is current, the communicator's is %d",
                    fake_current_ordinal(), comm->ordinal);
    }
    if (size > 0 && !fake_pointer_valid(buffer, size)) {
        return fail(ARL_NCCL_INVALID_ARGUMENT, "%p is not device memory", buffer);
    }
    return ARL_NCCL_SUCCESS;
}

static arl_nccl_result_t
group_leave(arl_nccl_result_t result)
{
    if (result != ARL_NCCL_SUCCESS || group_depth > 0) {
        return result;
    }
    return group_flush();
}

FAKE_EXPORT arl_ncclGroupStart_fn ncclGroupStart;
FAKE_EXPORT arl_nccl_result_t
ncclGroupStart(void)
{
    NCCL_FAIL();
    group_depth++;
    return ARL_NCCL_SUCCESS;
}

FAKE_EXPORT arl_ncclGroupEnd_fn ncclGroupEnd;
FAKE_EXPORT arl_nccl_result_t
ncclGroupEnd(void)
{
    const int failed = fake_fail_point(__func__);

    if (group_depth == 0) {
        return fail(ARL_NCCL_INVALID_USAGE, "ncclGroupEnd without ncclGroupStart");
    }
    group_depth--;
    if (failed != 0) {
        group_count = 0;
        return fail(ARL_NCCL_INTERNAL_ERROR, "ncclGroupEnd was told to fail");
    }
    return group_depth > 0 ? ARL_NCCL_SUCCESS : group_flush();
}

FAKE_EXPORT arl_ncclSend_fn ncclSend;
FAKE_EXPORT arl_nccl_result_t
ncclSend(const void *buffer, size_t count, arl_nccl_type_t type, int peer, arl_nccl_comm_t comm,
         arl_cu_stream_t stream)
{
    arl_nccl_result_t result;

    NCCL_FAIL();
    result = check_transfer(comm, buffer, count * type_size(type), type, peer);
    if (result == ARL_NCCL_SUCCESS) {
        result = group_add(comm, stream, buffer, count * type_size(type), comm->rank, peer);
        atomic_fetch_add(&sent_bytes, (long)(count * type_size(type)));
    }
    return group_leave(result);
}

FAKE_EXPORT arl_ncclRecv_fn ncclRecv;
FAKE_EXPORT arl_nccl_result_t
ncclRecv(void *buffer, size_t count, arl_nccl_type_t type, int peer, arl_nccl_comm_t comm,
         arl_cu_stream_t stream)
{
    arl_nccl_result_t result;

    NCCL_FAIL();
    result = check_transfer(comm, buffer, count * type_size(type), type, peer);
    if (result == ARL_NCCL_SUCCESS) {
        result = group_add(comm, stream, buffer, count * type_size(type), peer, comm->rank);
    }
    return group_leave(result);
}

FAKE_EXPORT arl_ncclBroadcast_fn ncclBroadcast;
FAKE_EXPORT arl_nccl_result_t
ncclBroadcast(const void *send, void *receive, size_t count, arl_nccl_type_t type, int root,
              arl_nccl_comm_t comm, arl_cu_stream_t stream)
{
    const size_t size = count * type_size(type);
    arl_nccl_result_t result;

    NCCL_FAIL();
    if (comm != NULL && comm->rank == root) {
        result = check_transfer(comm, send, size, type, root);
        for (int i = 0; i < comm->nranks && result == ARL_NCCL_SUCCESS; i++) {
            if (i != root) {
                result = group_add(comm, stream, send, size, root, i);
            }
        }
        if (result == ARL_NCCL_SUCCESS && send != receive && size > 0) {
            return fail(ARL_NCCL_INVALID_USAGE, "the fake broadcasts in place");
        }
        atomic_fetch_add(&sent_bytes, (long)size);
    }
    else {
        result = check_transfer(comm, receive, size, type, root);
        if (result == ARL_NCCL_SUCCESS) {
            result = group_add(comm, stream, receive, size, root, comm->rank);
        }
    }
    return group_leave(result);
}
