/* SPDX-License-Identifier: Apache-2.0 */
/* Device memory, pinned memory, IPC handles and modules of the fake driver. */
#include "fake_cuda.h"

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

static fake_block_t *blocks;
static uint64_t next_buffer_id = 1;

/* ---- memory --------------------------------------------------------------------------------- */

enum { FREED_MAX = 4096, FAKE_MAGIC = 0x46435544 };

static struct {
    uintptr_t base;
    size_t size;
} freed[FREED_MAX];
static size_t freed_count;

fake_block_t *
fake_block_find(uintptr_t pointer, size_t size)
{
    for (fake_block_t *block = blocks; block != NULL; block = block->next) {
        if (pointer >= block->base && pointer - block->base <= block->size &&
            size <= block->size - (pointer - block->base)) {
            return block;
        }
    }
    return NULL;
}

static bool
is_mapped(uintptr_t pointer)
{
    return msync((void *)(pointer & ~(uintptr_t)(FAKE_PAGE - 1)), FAKE_PAGE, MS_ASYNC) == 0;
}

bool
fake_was_freed(uintptr_t pointer)
{
    for (size_t i = 0; i < freed_count && i < FREED_MAX; i++) {
        if (pointer >= freed[i].base && pointer - freed[i].base < freed[i].size) {
            return true;
        }
    }
    return false;
}

FAKE_EXPORT bool
fake_pointer_valid(const void *pointer, size_t size)
{
    return fake_block_find((uintptr_t)pointer, size) != NULL;
}

static int
map_shared(const char *name, size_t size, bool create, fake_header_t **header_p)
{
    void *address;
    int fd = shm_open(name, O_RDWR | O_CLOEXEC | (create ? O_CREAT | O_EXCL : 0), 0600);

    if (fd < 0) {
        return -1;
    }
    if (create && ftruncate(fd, (off_t)(FAKE_PAGE + size)) < 0) {
        (void)close(fd);
        (void)shm_unlink(name);
        return -1;
    }
    address = mmap(NULL, FAKE_PAGE + size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    (void)close(fd);
    if (address == MAP_FAILED) {
        return -1;
    }
    *header_p = address;
    return 0;
}

static fake_block_t *
block_add(fake_kind_t kind, int ordinal, fake_header_t *header, size_t size)
{
    fake_block_t *block = calloc(1, sizeof(*block));

    if (block != NULL) {
        block->kind = kind;
        block->ordinal = ordinal;
        block->header = header;
        block->base = (uintptr_t)header + FAKE_PAGE;
        block->size = size;
        block->buffer_id = next_buffer_id++;
        block->next = blocks;
        blocks = block;
    }
    return block;
}

/* The addresses stay taken for a while, without memory behind them: whoever still uses them stops
 * right there, and nothing else can come to lie where device memory was. */
static void
address_retire(uintptr_t base, size_t size)
{
    const size_t slot = freed_count++ % FREED_MAX;

    if (freed[slot].base != 0) {
        (void)munmap((void *)freed[slot].base, freed[slot].size);
    }
    (void)mmap((void *)base, size, PROT_NONE,
               MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
    freed[slot].base = base;
    freed[slot].size = size;
}

static void
block_remove(fake_block_t *block)
{
    fake_block_t **link = &blocks;

    while (*link != block) {
        link = &(*link)->next;
    }
    *link = block->next;
    if (block->kind != FAKE_REGISTERED) { /* that is the caller's to unmap */
        address_retire((uintptr_t)block->header, FAKE_PAGE + block->size);
    }
    free(block);
}

static int
allocate(fake_kind_t kind, int ordinal, size_t size, uintptr_t *pointer)
{
    fake_device_t *device = &fake_devices[ordinal];
    char name[FAKE_NAME_MAX];
    fake_header_t *header;
    fake_block_t *block;
    uint64_t serial;

    if (size == 0) {
        return ARL_CUDA_ERROR_INVALID_VALUE;
    }
    if (size > fake_config.memory - device->used) {
        return ARL_CUDA_ERROR_OUT_OF_MEMORY;
    }
    serial = (uint64_t)atomic_fetch_add(&fake_control->serial, 1);
    (void)snprintf(name, sizeof(name), "/%s-%llx", fake_config.session, (unsigned long long)serial);
    if (map_shared(name, size, true, &header) < 0) {
        return ARL_CUDA_ERROR_OUT_OF_MEMORY;
    }
    block = block_add(kind, ordinal, header, size);
    if (block == NULL) {
        (void)munmap(header, FAKE_PAGE + size);
        (void)shm_unlink(name);
        return ARL_CUDA_ERROR_OUT_OF_MEMORY;
    }
    block->serial = serial;
    block->exporter = (uint32_t)getpid();
    (void)snprintf(block->name, sizeof(block->name), "%s", name);
    header->exporter = block->exporter;
    header->size = size;
    header->physical = device->physical;
    header->magic = FAKE_MAGIC;
    memset((char *)block->base, 0xA5, size); /* never zeros by luck */
    device->used += size;
    fake_live[FAKE_ALLOCATIONS]++;
    *pointer = block->base;
    return 0;
}

FAKE_EXPORT arl_cuMemAlloc_v2_fn cuMemAlloc_v2;
FAKE_EXPORT arl_cu_result_t
cuMemAlloc_v2(arl_cu_ptr_t *pointer, size_t size)
{
    int code;

    FAKE_FAIL();
    NEED_CONTEXT();
    (void)pthread_mutex_lock(&fake_lock);
    code = allocate(FAKE_LEGACY, fake_current()->ordinal, size, pointer);
    (void)pthread_mutex_unlock(&fake_lock);
    return code;
}

/* Memory as expandable segments and pools give it: no legacy handle can be made. */
FAKE_EXPORT int fake_cuda_alloc(int ordinal, size_t size, int vmm, uintptr_t *pointer);
FAKE_EXPORT int
fake_cuda_alloc(int ordinal, size_t size, int vmm, uintptr_t *pointer)
{
    int code;

    NEED_DEVICE(ordinal);
    (void)pthread_mutex_lock(&fake_lock);
    code = allocate(vmm ? FAKE_VMM : FAKE_LEGACY, ordinal, size, pointer);
    (void)pthread_mutex_unlock(&fake_lock);
    return code;
}

/* Killed processes close nothing; a zombie is as good as gone. */
static bool
pid_alive(int pid)
{
    char path[48], line[256];
    FILE *file;
    const char *end;

    (void)snprintf(path, sizeof(path), "/proc/%d/stat", pid);
    file = fopen(path, "r");
    if (file == NULL) {
        return false;
    }
    end = fgets(line, sizeof(line), file) == NULL ? NULL : strrchr(line, ')');
    (void)fclose(file);
    return end != NULL && end[1] != '\0' && end[2] != 'Z' && end[2] != 'X';
}

static int
release(uintptr_t pointer)
{
    fake_block_t *block = fake_block_find(pointer, 0);

    if (block == NULL || block->base != pointer ||
        (block->kind != FAKE_LEGACY && block->kind != FAKE_VMM)) {
        fake_misuse("cuMemFree of 0x%lx, which is %s", (unsigned long)pointer,
                    fake_was_freed(pointer) ? "freed already" : "not an allocation");
        return ARL_CUDA_ERROR_INVALID_VALUE;
    }
    for (int i = 0; i < FAKE_IMPORTERS_MAX; i++) {
        const int importer = atomic_load(&block->header->importers[i]);

        if (importer != 0 && pid_alive(importer)) {
            fake_misuse("process %d freed %s while process %d has it mapped", (int)getpid(),
                        block->name, importer);
        }
    }
    atomic_store(&block->header->freed, 1);
    memset((char *)block->base, 0xDB, block->size); /* seen by whoever still reads it */
    fake_devices[block->ordinal].used -= block->size;
    (void)shm_unlink(block->name);
    block_remove(block);
    fake_live[FAKE_ALLOCATIONS]--;
    return 0;
}

FAKE_EXPORT arl_cuMemFree_v2_fn cuMemFree_v2;
FAKE_EXPORT arl_cu_result_t
cuMemFree_v2(arl_cu_ptr_t pointer)
{
    const int failed = fake_fail_point(__func__);
    int code;

    NEED_INIT();
    if (pointer == 0) {
        return failed;
    }
    (void)pthread_mutex_lock(&fake_lock);
    fake_drain();
    code = release(pointer);
    (void)pthread_mutex_unlock(&fake_lock);
    return code != 0 ? code : failed;
}

FAKE_EXPORT arl_cuMemAllocHost_v2_fn cuMemAllocHost_v2;
FAKE_EXPORT arl_cu_result_t
cuMemAllocHost_v2(void **pointer, size_t size)
{
    fake_block_t *block;
    void *memory;

    FAKE_FAIL();
    NEED_CONTEXT();
    memory =
        mmap(NULL, FAKE_PAGE + size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) {
        return ARL_CUDA_ERROR_OUT_OF_MEMORY;
    }
    (void)pthread_mutex_lock(&fake_lock);
    block = block_add(FAKE_HOST, 0, memory, size);
    if (block != NULL) {
        fake_live[FAKE_HOST_BLOCKS]++;
        *pointer = (void *)block->base;
    }
    (void)pthread_mutex_unlock(&fake_lock);
    return block == NULL ? ARL_CUDA_ERROR_OUT_OF_MEMORY : 0;
}

FAKE_EXPORT arl_cuMemFreeHost_fn cuMemFreeHost;
FAKE_EXPORT arl_cu_result_t
cuMemFreeHost(void *pointer)
{
    const int failed = fake_fail_point(__func__);
    fake_block_t *block;
    int code = 0;

    NEED_INIT();
    (void)pthread_mutex_lock(&fake_lock);
    block = fake_block_find((uintptr_t)pointer, 0);
    if (block == NULL || block->kind != FAKE_HOST || block->base != (uintptr_t)pointer) {
        fake_misuse("cuMemFreeHost of %p, which is not pinned memory", pointer);
        code = ARL_CUDA_ERROR_INVALID_VALUE;
    }
    else {
        block_remove(block);
        fake_live[FAKE_HOST_BLOCKS]--;
    }
    (void)pthread_mutex_unlock(&fake_lock);
    return code != 0 ? code : failed;
}

FAKE_EXPORT arl_cuMemHostRegister_v2_fn cuMemHostRegister_v2;
FAKE_EXPORT arl_cu_result_t
cuMemHostRegister_v2(void *pointer, size_t size, unsigned int flags)
{
    fake_block_t *block;
    int code = 0;

    FAKE_FAIL();
    NEED_CONTEXT();
    if (size == 0 || !is_mapped((uintptr_t)pointer) ||
        (flags & ~(unsigned)ARL_CUDA_HOST_REGISTER_READ_ONLY) != 0) {
        return ARL_CUDA_ERROR_INVALID_VALUE;
    }
    (void)pthread_mutex_lock(&fake_lock);
    if (fake_block_find((uintptr_t)pointer, 1) != NULL) {
        code = FAKE_ERROR_ALREADY_REGISTERED;
    }
    else if ((block = block_add(FAKE_REGISTERED, 0, NULL, size)) == NULL) {
        code = ARL_CUDA_ERROR_OUT_OF_MEMORY;
    }
    else {
        block->base = (uintptr_t)pointer;
        fake_live[FAKE_HOST_BLOCKS]++;
    }
    (void)pthread_mutex_unlock(&fake_lock);
    return code;
}

FAKE_EXPORT arl_cuMemHostUnregister_fn cuMemHostUnregister;
FAKE_EXPORT arl_cu_result_t
cuMemHostUnregister(void *pointer)
{
    const int failed = fake_fail_point(__func__);
    fake_block_t *block;
    int code = 0;

    NEED_CONTEXT();
    (void)pthread_mutex_lock(&fake_lock);
    fake_drain();
    block = fake_block_find((uintptr_t)pointer, 0);
    if (block == NULL || block->kind != FAKE_REGISTERED || block->base != (uintptr_t)pointer) {
        fake_misuse("cuMemHostUnregister of %p, which is not registered", pointer);
        code = ARL_CUDA_ERROR_INVALID_VALUE;
    }
    else {
        if (!is_mapped(block->base)) {
            fake_misuse("%p was unmapped while it was registered", pointer);
        }
        block_remove(block);
        fake_live[FAKE_HOST_BLOCKS]--;
    }
    (void)pthread_mutex_unlock(&fake_lock);
    return code != 0 ? code : failed;
}

FAKE_EXPORT arl_cuMemGetInfo_v2_fn cuMemGetInfo_v2;
FAKE_EXPORT arl_cu_result_t
cuMemGetInfo_v2(size_t *free_bytes, size_t *total_bytes)
{
    FAKE_FAIL();
    NEED_CONTEXT();
    *total_bytes = fake_config.memory;
    *free_bytes = fake_config.memory - fake_devices[fake_current()->ordinal].used;
    return 0;
}

static int
attribute_of(const fake_block_t *block, arl_cu_pointer_attribute_t attribute, void *data)
{
    unsigned char flag;
    unsigned int word;

    switch (attribute) {
    case ARL_CUDA_POINTER_MEMORY_TYPE:
        word =
            block->kind == FAKE_HOST || block->kind == FAKE_REGISTERED ? 1 : ARL_CUDA_MEMORY_DEVICE;
        memcpy(data, &word, sizeof(word));
        return 0;
    case ARL_CUDA_POINTER_BUFFER_ID:
        memcpy(data, &block->buffer_id, sizeof(block->buffer_id));
        return 0;
    case ARL_CUDA_POINTER_IS_MANAGED:
        flag = 0;
        memcpy(data, &flag, 1);
        return 0;
    case ARL_CUDA_POINTER_LEGACY_IPC_CAPABLE:
        flag = block->kind == FAKE_LEGACY;
        memcpy(data, &flag, 1);
        return 0;
    case ARL_CUDA_POINTER_DEVICE_ORDINAL:
        memcpy(data, &block->ordinal, sizeof(block->ordinal));
        return 0;
    case ARL_CUDA_POINTER_RANGE_START:
        memcpy(data, &block->base, sizeof(block->base));
        return 0;
    case ARL_CUDA_POINTER_RANGE_SIZE:
        memcpy(data, &block->size, sizeof(block->size));
        return 0;
    default:
        return ARL_CUDA_ERROR_INVALID_VALUE;
    }
}

/* As the real one: a pointer that is none of ours is no error, and has no attributes. */
FAKE_EXPORT arl_cuPointerGetAttributes_fn cuPointerGetAttributes;
FAKE_EXPORT arl_cu_result_t
cuPointerGetAttributes(unsigned int count, arl_cu_pointer_attribute_t *attributes, void **data,
                       arl_cu_ptr_t pointer)
{
    const fake_block_t *block;
    int code = 0;

    FAKE_FAIL();
    NEED_INIT();
    (void)pthread_mutex_lock(&fake_lock);
    block = fake_block_find(pointer, 1);
    for (unsigned int i = 0; i < count && block != NULL && code == 0; i++) {
        code = attribute_of(block, attributes[i], data[i]);
    }
    (void)pthread_mutex_unlock(&fake_lock);
    return code;
}

/* ---- IPC ------------------------------------------------------------------------------------ */

typedef struct fake_ipc {
    uint32_t magic;
    uint32_t exporter;
    uint64_t serial;
    char name[FAKE_NAME_MAX];
} fake_ipc_t;

_Static_assert(sizeof(fake_ipc_t) == sizeof(arl_cu_ipc_handle_t), "handle size");

FAKE_EXPORT arl_cuIpcGetMemHandle_fn cuIpcGetMemHandle;
FAKE_EXPORT arl_cu_result_t
cuIpcGetMemHandle(arl_cu_ipc_handle_t *handle, arl_cu_ptr_t pointer)
{
    const fake_block_t *block;
    fake_ipc_t ipc = {.magic = FAKE_MAGIC};

    FAKE_FAIL();
    NEED_CONTEXT();
    if (fake_config.no_ipc) {
        return FAKE_ERROR_NOT_SUPPORTED;
    }
    (void)pthread_mutex_lock(&fake_lock);
    block = fake_block_find(pointer, 1);
    if (block != NULL && block->kind == FAKE_LEGACY) {
        ipc.exporter = block->exporter;
        ipc.serial = block->serial;
        memcpy(ipc.name, block->name, sizeof(ipc.name));
    }
    (void)pthread_mutex_unlock(&fake_lock);
    if (ipc.exporter == 0) {
        return ARL_CUDA_ERROR_INVALID_VALUE;
    }
    memcpy(handle, &ipc, sizeof(ipc));
    return 0;
}

static int
physical_ordinal(int physical)
{
    for (int i = 0; i < fake_device_count; i++) {
        if (fake_devices[i].physical == physical) {
            return i;
        }
    }
    return -1;
}

static int
import_mapped(const fake_ipc_t *ipc, fake_header_t *header, bool peer_allowed, uintptr_t *pointer)
{
    const int ordinal = physical_ordinal(header->physical);
    const int current = fake_current()->ordinal;
    fake_block_t *block;
    int slot = -1;

    if (header->magic != FAKE_MAGIC || atomic_load(&header->freed)) {
        return ARL_CUDA_ERROR_INVALID_VALUE;
    }
    if (header->physical != fake_devices[current].physical &&
        (!peer_allowed || fake_config.no_peer)) {
        return FAKE_ERROR_PEER_UNSUPPORTED;
    }
    for (int i = 0; i < FAKE_IMPORTERS_MAX && slot < 0; i++) {
        int nobody = 0;

        if (atomic_compare_exchange_strong(&header->importers[i], &nobody, (int)getpid())) {
            slot = i;
        }
    }
    block = slot < 0
                ? NULL
                : block_add(FAKE_IMPORTED, ordinal < 0 ? current : ordinal, header, header->size);
    if (block == NULL) {
        return ARL_CUDA_ERROR_OUT_OF_MEMORY;
    }
    block->serial = ipc->serial;
    block->exporter = ipc->exporter;
    block->opens = 1;
    fake_live[FAKE_MAPPINGS]++;
    *pointer = block->base;
    return 0;
}

static int
import(const fake_ipc_t *ipc, bool peer_allowed, uintptr_t *pointer)
{
    fake_header_t *header;
    size_t size;
    int code;

    for (fake_block_t *block = blocks; block != NULL; block = block->next) {
        if (block->kind == FAKE_IMPORTED && block->serial == ipc->serial) {
            block->opens++;
            *pointer = block->base;
            return 0;
        }
    }
    if (map_shared(ipc->name, 0, false, &header) < 0) {
        return ARL_CUDA_ERROR_INVALID_VALUE; /* freed, or its process is gone */
    }
    size = header->size; /* the header first, to learn how much to map */
    (void)munmap(header, FAKE_PAGE);
    if (map_shared(ipc->name, size, false, &header) < 0) {
        return ARL_CUDA_ERROR_INVALID_VALUE;
    }
    code = import_mapped(ipc, header, peer_allowed, pointer);
    if (code != 0) {
        (void)munmap(header, FAKE_PAGE + size);
    }
    return code;
}

FAKE_EXPORT arl_cuIpcOpenMemHandle_v2_fn cuIpcOpenMemHandle_v2;
FAKE_EXPORT arl_cu_result_t
cuIpcOpenMemHandle_v2(arl_cu_ptr_t *pointer, arl_cu_ipc_handle_t handle, unsigned int flags)
{
    fake_ipc_t ipc;
    int code;

    FAKE_FAIL();
    NEED_CONTEXT();
    memcpy(&ipc, &handle, sizeof(ipc));
    ipc.name[sizeof(ipc.name) - 1] = '\0';
    if (ipc.magic != FAKE_MAGIC) {
        return ARL_CUDA_ERROR_INVALID_VALUE;
    }
    if (ipc.exporter == (uint32_t)getpid()) {
        return ARL_CUDA_ERROR_INVALID_CONTEXT; /* as measured on the real driver */
    }
    (void)pthread_mutex_lock(&fake_lock);
    code = import(&ipc, (flags & ARL_CUDA_IPC_LAZY_ENABLE_PEER_ACCESS) != 0, pointer);
    (void)pthread_mutex_unlock(&fake_lock);
    return code;
}

FAKE_EXPORT arl_cuIpcCloseMemHandle_fn cuIpcCloseMemHandle;
FAKE_EXPORT arl_cu_result_t
cuIpcCloseMemHandle(arl_cu_ptr_t pointer)
{
    const int failed = fake_fail_point(__func__);
    fake_block_t *block;
    int code = 0;

    NEED_INIT();
    (void)pthread_mutex_lock(&fake_lock);
    block = fake_block_find(pointer, 0);
    if (block == NULL || block->kind != FAKE_IMPORTED || block->base != pointer) {
        fake_misuse("cuIpcCloseMemHandle of 0x%lx, which is not open", (unsigned long)pointer);
        code = ARL_CUDA_ERROR_INVALID_VALUE;
    }
    else if (--block->opens == 0) {
        for (int i = 0; i < FAKE_IMPORTERS_MAX; i++) {
            int self = (int)getpid();

            if (atomic_compare_exchange_strong(&block->header->importers[i], &self, 0)) {
                break;
            }
        }
        block_remove(block);
        fake_live[FAKE_MAPPINGS]--;
    }
    (void)pthread_mutex_unlock(&fake_lock);
    return code != 0 ? code : failed;
}

/* ---- modules -------------------------------------------------------------------------------- */

struct arl_cu_module {
    const char *image;
};

FAKE_EXPORT arl_cuModuleLoadDataEx_fn cuModuleLoadDataEx;
FAKE_EXPORT arl_cu_result_t
cuModuleLoadDataEx(arl_cu_module_t *module, const void *image, unsigned int count,
                   arl_cu_jit_option_t *options, void **values)
{
    (void)options;
    (void)values;
    FAKE_FAIL();
    NEED_CONTEXT();
    if (fake_config.no_ptx || count != 0 || strstr(image, ".version") == NULL) {
        return FAKE_ERROR_INVALID_PTX;
    }
    *module = calloc(1, sizeof(**module));
    if (*module == NULL) {
        return ARL_CUDA_ERROR_OUT_OF_MEMORY;
    }
    (*module)->image = image; /* the caller's text is static */
    fake_live[FAKE_MODULES]++;
    return 0;
}

FAKE_EXPORT arl_cuModuleUnload_fn cuModuleUnload;
FAKE_EXPORT arl_cu_result_t
cuModuleUnload(arl_cu_module_t module)
{
    const int failed = fake_fail_point(__func__);

    free(module);
    fake_live[FAKE_MODULES]--;
    return failed;
}

FAKE_EXPORT arl_cuModuleGetFunction_fn cuModuleGetFunction;
FAKE_EXPORT arl_cu_result_t
cuModuleGetFunction(arl_cu_function_t *function, arl_cu_module_t module, const char *name)
{
    int kernel;

    FAKE_FAIL();
    NEED_CONTEXT();
    kernel = fake_kernel_find(module->image, name);
    if (kernel < 0) {
        return FAKE_ERROR_NOT_FOUND;
    }
    *function = (arl_cu_function_t)(uintptr_t)(kernel + 1);
    return 0;
}
