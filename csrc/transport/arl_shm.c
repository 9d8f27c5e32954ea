/* SPDX-License-Identifier: Apache-2.0 */
#include "transport/arl_shm.h"

#include "transport/arl_peer.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

static const char FOLDER[] = "/dev/shm";
static const char CREATE[] = "create shared memory";
static const char OPEN[] = "open shared memory";

/* "/arl-" namespace "-" pid "-" start time "-" 24 random digits, all hexadecimal. */
#define NAME_FORMAT "/arl-%" PRIx64 "-%" PRIx64 "-%" PRIx64 "-%s"

/* ---- names to remove at exit ----------------------------------------------------------------- */

static pthread_mutex_t linked_lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_once_t linked_once = PTHREAD_ONCE_INIT;
static arl_shm_t *linked_list;
static pid_t linked_owner;

/* Runs at a normal exit only; what a killed process leaves is for the next sweep. */
static void
linked_remove_all(void)
{
    if (getpid() != linked_owner) {
        return;
    }
    (void)pthread_mutex_lock(&linked_lock);
    for (arl_shm_t *shm = linked_list; shm != NULL; shm = shm->next) {
        (void)shm_unlink(shm->name);
    }
    linked_list = NULL;
    (void)pthread_mutex_unlock(&linked_lock);
}

/* The parent's files are the parent's to remove, and the lock may have been held just then. */
static void
linked_after_fork(void)
{
    (void)pthread_mutex_init(&linked_lock, NULL);
    linked_list = NULL;
    linked_owner = getpid();
}

static void
linked_prepare(void)
{
    linked_owner = getpid();
    (void)atexit(linked_remove_all);
    (void)pthread_atfork(NULL, NULL, linked_after_fork);
}

static void
linked_add(arl_shm_t *shm)
{
    (void)pthread_once(&linked_once, linked_prepare);
    (void)pthread_mutex_lock(&linked_lock);
    shm->linked = true;
    shm->next = linked_list;
    linked_list = shm;
    (void)pthread_mutex_unlock(&linked_lock);
}

static void
linked_drop(arl_shm_t *shm)
{
    (void)pthread_mutex_lock(&linked_lock);
    for (arl_shm_t **at = &linked_list; *at != NULL; at = &(*at)->next) {
        if (*at == shm) {
            *at = shm->next;
            break;
        }
    }
    (void)pthread_mutex_unlock(&linked_lock);
    shm->next = NULL;
    shm->linked = false;
}

/* ---- making ---------------------------------------------------------------------------------- */

arl_status_t
arl_random(void *bytes, size_t size, arl_error_t *err)
{
    size_t used = 0;

    while (used < size) {
        const ssize_t n = getrandom((char *)bytes + used, size - used, 0);

        if (n < 0 && errno != EINTR) {
            return arl_error_set_errno(err, "draw random bytes", errno, "getrandom failed");
        }
        used += n > 0 ? (size_t)n : 0;
    }
    return ARL_OK;
}

static arl_status_t
make_name(char *name, arl_error_t *err)
{
    arl_peer_t self;
    uint8_t random[12];
    char digits[2 * sizeof(random) + 1];
    arl_status_t status = arl_peer_self(&self, err);

    if (status != ARL_OK || (status = arl_random(random, sizeof(random), err)) != ARL_OK) {
        return status;
    }
    for (size_t i = 0; i < sizeof(random); i++) {
        (void)snprintf(digits + 2 * i, 3, "%02x", random[i]);
    }
    memset(name, 0, ARL_OFFER_HOST_MAX); /* all of it travels in offers */
    (void)snprintf(name, ARL_OFFER_HOST_MAX, NAME_FORMAT, self.pid_namespace, (uint64_t)self.pid,
                   self.start_time, digits);
    return ARL_OK;
}

static arl_status_t
no_space(int errnum, size_t size, arl_error_t *err)
{
    struct statvfs info;

    if (errnum == ENOSPC && statvfs(FOLDER, &info) == 0) {
        const unsigned long long block = info.f_frsize;

        return arl_error_set_errno(err, CREATE, errnum,
                                   "%s has %llu of %llu MiB free and %llu are needed: enlarge it "
                                   "(docker run --shm-size, mount -o remount,size=) or remove "
                                   "what fills it",
                                   FOLDER, info.f_bavail * block >> 20, info.f_blocks * block >> 20,
                                   ((unsigned long long)size >> 20) + 1);
    }
    return arl_error_set_errno(err, CREATE, errnum, "cannot reserve %zu bytes in %s", size, FOLDER);
}

/* In pieces: a signal makes the kernel give back the whole of one, so a large one might never
 * end while signals keep coming. */
static arl_status_t
reserve(int fd, size_t size, arl_error_t *err)
{
    const size_t piece = (size_t)32 << 20;
    struct statvfs info;

    /* Asked first, so that a hopeless reservation does not fill memory before it fails. */
    if (fstatvfs(fd, &info) == 0 && info.f_blocks != 0 && size / info.f_frsize > info.f_bavail) {
        return no_space(ENOSPC, size, err);
    }
    if (ftruncate(fd, (off_t)size) != 0) {
        return no_space(errno, size, err);
    }
    for (size_t at = 0; at < size;) {
        const size_t take = size - at < piece ? size - at : piece;
        const int errnum = fallocate(fd, 0, (off_t)at, (off_t)take) == 0 ? 0 : errno;

        if (errnum == 0) {
            at += take;
        }
        else if (errnum != EINTR) {
            return no_space(errnum, size, err);
        }
    }
    return ARL_OK;
}

arl_status_t
arl_shm_create(size_t size, arl_shm_t *shm_p, arl_error_t *err)
{
    char name[ARL_OFFER_HOST_MAX];
    void *map;
    int fd;
    arl_status_t status = make_name(name, err);

    if (status != ARL_OK) {
        return status;
    }
    fd = shm_open(name, O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, S_IRUSR | S_IWUSR);
    if (fd < 0) {
        return arl_error_set_errno(err, CREATE, errno,
                                   "cannot create %s%s; is %s there, and writable?", FOLDER, name,
                                   FOLDER);
    }
    ARL_CHECK_GOTO(status, reserve(fd, size, err), unlink_name);
    map = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (map == MAP_FAILED) {
        status = arl_error_set_errno(err, CREATE, errno, "cannot map %zu bytes", size);
        goto unlink_name;
    }
    (void)close(fd);
    memset(shm_p, 0, sizeof(*shm_p));
    memcpy(shm_p->name, name, sizeof(name));
    shm_p->map = map;
    shm_p->size = size;
    linked_add(shm_p);
    return ARL_OK;
unlink_name:
    (void)shm_unlink(name);
    (void)close(fd);
    return status;
}

/* ---- opening --------------------------------------------------------------------------------- */

static arl_status_t
check_file(int fd, const char *name, size_t size, arl_error_t *err)
{
    struct stat info;

    if (fstat(fd, &info) != 0) {
        return arl_error_set_errno(err, OPEN, errno, "cannot examine %s%s", FOLDER, name);
    }
    if (info.st_uid != geteuid() || (info.st_mode & (S_IRWXG | S_IRWXO)) != 0) {
        return arl_error_set(err, ARL_ERR_SYNC, OPEN,
                             "%s%s belongs to user %lld with mode %o, this process runs as user "
                             "%lld: only private memory of the same user is accepted",
                             FOLDER, name, (long long)info.st_uid, (unsigned)(info.st_mode & 0777),
                             (long long)geteuid());
    }
    if (!S_ISREG(info.st_mode) || info.st_size < 0 || (size_t)info.st_size != size) {
        return arl_error_set(err, ARL_ERR_SYNC, OPEN, "%s%s has %lld bytes, %zu were expected",
                             FOLDER, name, (long long)info.st_size, size);
    }
    return ARL_OK;
}

/* Only names that arl_shm_create makes: nothing in an offer can make us open another file. */
static bool
name_valid(const char *name)
{
    return strncmp(name, "/arl-", 5) == 0 && strchr(name + 1, '/') == NULL;
}

arl_status_t
arl_shm_open(const char *name, size_t size, arl_shm_mode_t mode, arl_shm_t *shm_p, arl_error_t *err)
{
    const int prot = mode == ARL_SHM_READ ? PROT_READ : PROT_READ | PROT_WRITE;
    const int flags = mode == ARL_SHM_COPY ? MAP_PRIVATE | MAP_NORESERVE : MAP_SHARED;
    void *map;
    int fd;
    arl_status_t status = ARL_OK;

    if (!name_valid(name)) {
        return arl_error_set(err, ARL_ERR_SYNC, OPEN, "\"%s\" is not a name this library makes",
                             name);
    }
    fd = shm_open(name, (mode == ARL_SHM_WRITE ? O_RDWR : O_RDONLY) | O_CLOEXEC, 0);
    if (fd < 0 && errno == ENOENT) {
        return arl_error_set(err, ARL_ERR_PEER_LOST, OPEN, "%s%s does not exist", FOLDER, name);
    }
    if (fd < 0) {
        return arl_error_set_errno(err, OPEN, errno, "cannot open %s%s", FOLDER, name);
    }
    ARL_CHECK_GOTO(status, check_file(fd, name, size, err), close_file);
    map = mmap(NULL, size, prot, flags, fd, 0);
    if (map == MAP_FAILED) {
        status = arl_error_set_errno(err, OPEN, errno, "cannot map %zu bytes of %s%s", size, FOLDER,
                                     name);
        goto close_file;
    }
    memset(shm_p, 0, sizeof(*shm_p));
    (void)snprintf(shm_p->name, sizeof(shm_p->name), "%s", name);
    shm_p->map = map;
    shm_p->size = size;
close_file:
    (void)close(fd);
    return status;
}

/* ---- ending ---------------------------------------------------------------------------------- */

void
arl_shm_unlink(arl_shm_t *shm)
{
    if (shm->name[0] == '\0') {
        return;
    }
    (void)shm_unlink(shm->name);
    if (shm->linked) {
        linked_drop(shm);
    }
}

void
arl_shm_close(arl_shm_t *shm)
{
    if (shm->linked) {
        arl_shm_unlink(shm);
    }
    arl_shm_forget(shm);
}

void
arl_shm_forget(arl_shm_t *shm)
{
    if (shm->map != NULL) {
        (void)munmap(shm->map, shm->size);
    }
    memset(shm, 0, sizeof(*shm));
}

void
arl_shm_sweep(void)
{
    arl_peer_t self;
    struct dirent *entry;
    DIR *folder;

    if (arl_peer_self(&self, NULL) != ARL_OK || (folder = opendir(FOLDER)) == NULL) {
        return; /* cleaning up after others is not worth an error */
    }
    while ((entry = readdir(folder)) != NULL) {
        uint64_t pid_namespace, pid, start_time;
        char name[sizeof(entry->d_name) + 1];

        if (strncmp(entry->d_name, "arl-", 4) != 0 ||
            sscanf(entry->d_name, "arl-%" SCNx64 "-%" SCNx64 "-%" SCNx64 "-", &pid_namespace, &pid,
                   &start_time) != 3 ||
            pid_namespace != self.pid_namespace || pid == 0 || pid > INT32_MAX ||
            arl_peer_alive((int64_t)pid, start_time)) {
            continue;
        }
        (void)snprintf(name, sizeof(name), "/%s", entry->d_name);
        (void)shm_unlink(name);
    }
    (void)closedir(folder);
}
