/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Failure points, linked into the extension by ARL_FAULTS=1 and into nothing that ships. The
 * linker sends every allocation and system call of csrc through __wrap_<name> (setup.py holds
 * the list, read from the table below), and the interpreter's allocators are hooked, so no line
 * of csrc knows about it.
 *
 * arl_faults_call(callable, kinds, n) calls it with the n-th fallible call inside failing, once;
 * arl_faults_fired() says whether it came that far. Both are for ctypes.PyDLL.
 */
#include <Python.h>

#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <link.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>
#include <unwind.h>

enum { FAULT_SYSTEM = 1, FAULT_PYTHON = 2 };

static atomic_long countdown;
static atomic_int kinds_armed;
static atomic_int fired;
static pthread_t armed_thread;

/* A place for a breakpoint: `break arl_faults_fire` shows which call was made to fail. */
static __attribute__((noinline)) void
arl_faults_fire(void)
{
    atomic_fetch_add(&fired, 1);
}

static int
fails(int kind)
{
    if ((atomic_load(&kinds_armed) & kind) == 0) {
        return 0;
    }
    if (atomic_fetch_sub(&countdown, 1) != 1) {
        return 0;
    }
    arl_faults_fire();
    return 1;
}

/* WRAP(result, name, parameters, arguments, value on failure, errno): one line per call. */
#define WRAP(result, name, parameters, arguments, failed, number)                                  \
    result __real_##name parameters;                                                               \
    result __wrap_##name parameters;                                                               \
    result __wrap_##name parameters                                                                \
    {                                                                                              \
        if (fails(FAULT_SYSTEM)) {                                                                 \
            errno = (number);                                                                      \
            return failed;                                                                         \
        }                                                                                          \
        return __real_##name arguments;                                                            \
    }

WRAP(void *, malloc, (size_t size), (size), NULL, ENOMEM)
WRAP(void *, calloc, (size_t count, size_t size), (count, size), NULL, ENOMEM)
WRAP(void *, realloc, (void *old, size_t size), (old, size), NULL, ENOMEM)
WRAP(char *, strdup, (const char *text), (text), NULL, ENOMEM)
WRAP(int, posix_memalign, (void **out, size_t align, size_t size), (out, align, size), ENOMEM,
     ENOMEM)
WRAP(void *, mmap, (void *at, size_t size, int protect, int flags, int fd, off_t offset),
     (at, size, protect, flags, fd, offset), MAP_FAILED, ENOMEM)
WRAP(int, shm_open, (const char *name, int flags, mode_t mode), (name, flags, mode), -1, EMFILE)
WRAP(int, memfd_create, (const char *name, unsigned int flags), (name, flags), -1, EMFILE)
WRAP(int, ftruncate, (int fd, off_t size), (fd, size), -1, ENOSPC)
WRAP(int, posix_fallocate, (int fd, off_t at, off_t size), (fd, at, size), ENOSPC, ENOSPC)
WRAP(int, fallocate, (int fd, int mode, off_t at, off_t size), (fd, mode, at, size), -1, ENOSPC)
WRAP(ssize_t, getrandom, (void *out, size_t size, unsigned int flags), (out, size, flags), -1,
     ENOSYS)
WRAP(int, fstat, (int fd, struct stat *out), (fd, out), -1, EIO)
WRAP(int, socket, (int domain, int type, int protocol), (domain, type, protocol), -1, EMFILE)
WRAP(int, socketpair, (int domain, int type, int protocol, int *out), (domain, type, protocol, out),
     -1, EMFILE)
WRAP(int, bind, (int fd, const struct sockaddr *address, socklen_t size), (fd, address, size), -1,
     EADDRINUSE)
WRAP(int, listen, (int fd, int backlog), (fd, backlog), -1, EADDRINUSE)
WRAP(int, connect, (int fd, const struct sockaddr *address, socklen_t size), (fd, address, size),
     -1, ECONNREFUSED)
WRAP(int, accept4, (int fd, struct sockaddr *address, socklen_t *size, int flags),
     (fd, address, size, flags), -1, EMFILE)
WRAP(ssize_t, send, (int fd, const void *data, size_t size, int flags), (fd, data, size, flags), -1,
     EPIPE)
WRAP(ssize_t, recv, (int fd, void *data, size_t size, int flags), (fd, data, size, flags), -1,
     ECONNRESET)
WRAP(int, pthread_create,
     (pthread_t * out, const pthread_attr_t *attributes, void *(*run)(void *), void *argument),
     (out, attributes, run, argument), EAGAIN, EAGAIN)

int __real_open(const char *path, int flags, ...);
int __wrap_open(const char *path, int flags, ...);
int
__wrap_open(const char *path, int flags, ...)
{
    mode_t mode = 0;

    if ((flags & O_CREAT) != 0) {
        va_list args;

        va_start(args, flags);
        mode = va_arg(args, mode_t);
        va_end(args);
    }
    if (fails(FAULT_SYSTEM)) {
        errno = EMFILE;
        return -1;
    }
    return __real_open(path, flags, mode);
}

/* ---- the interpreter's allocators ------------------------------------------------------------ */

typedef struct range {
    const char *begin, *end;
} range_t;

static PyMemAllocatorEx original[3];
static range_t extension, eval_loop; /* this shared object; the interpreter's own loop */

static int
in_range(const range_t *range, const void *address)
{
    return (const char *)address >= range->begin && (const char *)address < range->end;
}

static int
find_extension(struct dl_phdr_info *info, size_t size, void *unused)
{
    const char *here = (const char *)(uintptr_t)&find_extension;

    (void)size;
    (void)unused;
    for (int i = 0; i < info->dlpi_phnum; i++) {
        const ElfW(Phdr) *header = &info->dlpi_phdr[i];
        const char *begin = (const char *)(uintptr_t)(info->dlpi_addr + header->p_vaddr);
        const range_t range = {begin, begin + header->p_memsz};

        if (header->p_type == PT_LOAD && in_range(&range, here)) {
            extension = range;
            return 1;
        }
    }
    return 0;
}

typedef struct walk {
    const void *caller;
    int passed; /* the caller of the hook has been seen; nearer frames are this file's */
    int found;
} walk_t;

static _Unwind_Reason_Code
walk_frame(struct _Unwind_Context *context, void *argument)
{
    walk_t *walk = argument;
    const void *at = (const void *)_Unwind_GetIP(context);

    walk->passed |= at == walk->caller;
    if (!walk->passed) {
        return _URC_NO_REASON;
    }
    walk->found = in_range(&extension, at);
    return walk->found || in_range(&eval_loop, at) ? _URC_NORMAL_STOP : _URC_NO_REASON;
}

static void
find_ranges(void)
{
    void *loop = dlsym(RTLD_DEFAULT, "_PyEval_EvalFrameDefault");
    walk_t walk = {0};
    ElfW(Sym) * symbol;
    Dl_info info;

    (void)dl_iterate_phdr(find_extension, NULL);
    if (loop != NULL && dladdr1(loop, &info, (void **)&symbol, RTLD_DL_SYMENT) != 0) {
        eval_loop.begin = loop;
        eval_loop.end = (const char *)loop + symbol->st_size;
    }
    (void)_Unwind_Backtrace(walk_frame, &walk); /* what it allocates, it allocates now */
}

/*
 * Whether an allocation was asked for by csrc: its nearest caller is, below it only the API that
 * it called. When the eval loop comes first it is Python code's own, whose error paths, some of
 * them leaking, are not ours to test.
 */
static int
from_csrc(const void *caller)
{
    walk_t walk = {.caller = caller};

    if (!in_range(&extension, caller)) {
        (void)_Unwind_Backtrace(walk_frame, &walk);
        return walk.found;
    }
    return 1;
}

static int
python_fails(const void *caller)
{
    return atomic_load(&countdown) > 0 && (atomic_load(&kinds_armed) & FAULT_PYTHON) != 0 &&
           pthread_equal(pthread_self(), armed_thread) && from_csrc(caller) && fails(FAULT_PYTHON);
}

#define CALLER __builtin_return_address(0)

static void *
hook_malloc(void *context, size_t size)
{
    PyMemAllocatorEx *next = context;

    return python_fails(CALLER) ? NULL : next->malloc(next->ctx, size);
}

static void *
hook_calloc(void *context, size_t count, size_t size)
{
    PyMemAllocatorEx *next = context;

    return python_fails(CALLER) ? NULL : next->calloc(next->ctx, count, size);
}

static void *
hook_realloc(void *context, void *old, size_t size)
{
    PyMemAllocatorEx *next = context;

    return python_fails(CALLER) ? NULL : next->realloc(next->ctx, old, size);
}

static void
hook_free(void *context, void *memory)
{
    PyMemAllocatorEx *next = context;

    next->free(next->ctx, memory);
}

#define EXPORT __attribute__((visibility("default")))

EXPORT PyObject *arl_faults_call(PyObject *callable, int kinds, long n);
EXPORT int arl_faults_fired(void);

PyObject *
arl_faults_call(PyObject *callable, int kinds, long n)
{
    static const PyMemAllocatorDomain domains[3] = {PYMEM_DOMAIN_RAW, PYMEM_DOMAIN_MEM,
                                                    PYMEM_DOMAIN_OBJ};
    PyObject *result;

    if (original[0].malloc == NULL) {
        find_ranges();
        for (int i = 0; i < 3; i++) {
            PyMemAllocatorEx hook = {&original[i], hook_malloc, hook_calloc, hook_realloc,
                                     hook_free};

            PyMem_GetAllocator(domains[i], &original[i]);
            PyMem_SetAllocator(domains[i], &hook);
        }
    }
    armed_thread = pthread_self();
    atomic_store(&fired, 0);
    atomic_store(&countdown, n);
    atomic_store(&kinds_armed, kinds);
    result = PyObject_CallNoArgs(callable);
    atomic_store(&kinds_armed, 0);
    return result;
}

int
arl_faults_fired(void)
{
    return atomic_load(&fired);
}
