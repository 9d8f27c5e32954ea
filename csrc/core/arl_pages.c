/* SPDX-License-Identifier: Apache-2.0 */
#include "core/arl_pages.h"

#include <errno.h>
#include <stdint.h>
#include <sys/mman.h>

enum {
    SMALL = 4096,
    HUGE = 2 << 20,
    ADVISE_FROM = 4 << 20, /* below this the system call costs what it saves */
    ALLOC_FROM = 8 << 20,  /* below this a rounded size could waste more than a quarter */
    TAIL_FROM = 512 << 10, /* a last part of so many bytes gets a huge page */
};

void
arl_pages_prefer_huge(void *data, size_t size)
{
    const uintptr_t begin = ((uintptr_t)data + SMALL - 1) & ~(uintptr_t)(SMALL - 1);
    const uintptr_t end = ((uintptr_t)data + size) & ~(uintptr_t)(SMALL - 1);

    if (size >= ADVISE_FROM) {
        (void)madvise((void *)begin, end - begin, MADV_HUGEPAGE);
    }
}

bool
arl_pages_worthwhile(size_t size)
{
    return size >= ALLOC_FROM;
}

/* What is mapped for `size` bytes. */
static size_t
mapped_size(size_t size)
{
    const size_t unit = size % HUGE >= TAIL_FROM ? HUGE : SMALL;

    return (size + unit - 1) / unit * unit;
}

void *
arl_pages_alloc(size_t size)
{
    const size_t wanted = mapped_size(size);
    char *mapped, *data;
    size_t before;

    if (size > SIZE_MAX / 2) {
        errno = ENOMEM;
        return NULL;
    }
    /* One huge page more, so that an aligned part is inside; what is around it goes back. */
    mapped = mmap(NULL, wanted + HUGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (mapped == MAP_FAILED) {
        return NULL;
    }
    before = (HUGE - (uintptr_t)mapped % HUGE) % HUGE;
    data = mapped + before;
    if (before > 0) {
        (void)munmap(mapped, before);
    }
    (void)munmap(data + wanted, HUGE - before);
    (void)madvise(data, wanted, MADV_HUGEPAGE);
    return data;
}

void
arl_pages_free(void *data, size_t size)
{
    (void)munmap(data, mapped_size(size));
}
