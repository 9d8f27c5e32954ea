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

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

enum { FAULT_SYSTEM = 1, FAULT_PYTHON = 2 };

static atomic_long countdown;
static atomic_int kinds_armed;
static atomic_int fired;
static pthread_t armed_thread;

/* Python's allocators are watched on the arming thread alone: others' failures are not ours. */
static int
fails(int kind)
{
    if ((atomic_load(&kinds_armed) & kind) == 0 ||
        (kind == FAULT_PYTHON && !pthread_equal(pthread_self(), armed_thread))) {
        return 0;
    }
    if (atomic_fetch_sub(&countdown, 1) != 1) {
        return 0;
    }
    atomic_fetch_add(&fired, 1);
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

static PyMemAllocatorEx original[3];

static void *
hook_malloc(void *context, size_t size)
{
    PyMemAllocatorEx *next = context;

    return fails(FAULT_PYTHON) ? NULL : next->malloc(next->ctx, size);
}

static void *
hook_calloc(void *context, size_t count, size_t size)
{
    PyMemAllocatorEx *next = context;

    return fails(FAULT_PYTHON) ? NULL : next->calloc(next->ctx, count, size);
}

static void *
hook_realloc(void *context, void *old, size_t size)
{
    PyMemAllocatorEx *next = context;

    return fails(FAULT_PYTHON) ? NULL : next->realloc(next->ctx, old, size);
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
