/* SPDX-License-Identifier: Apache-2.0 */
#include "core/arl_pages.h"

#include <stdint.h>
#include <sys/mman.h>

enum {
    WORTHWHILE = 4 << 20, /* below this the system call costs what it saves */
    PAGE = 4096,
};

void
arl_pages_prefer_huge(void *data, size_t size)
{
    const uintptr_t begin = ((uintptr_t)data + PAGE - 1) & ~(uintptr_t)(PAGE - 1);
    const uintptr_t end = ((uintptr_t)data + size) & ~(uintptr_t)(PAGE - 1);

    if (size >= WORTHWHILE) {
        (void)madvise((void *)begin, end - begin, MADV_HUGEPAGE);
    }
}
