/* SPDX-License-Identifier: Apache-2.0 */
#ifndef ARL_CORE_PAGES_H
#define ARL_CORE_PAGES_H

#include <stddef.h>

/*
 * Asks for huge pages behind freshly allocated memory that is about to be written from end to
 * end. The first touch of 2 MiB is then one page fault instead of 512, which is most of the
 * cost of filling new memory. Advice only: small blocks and refusals change nothing.
 */
void arl_pages_prefer_huge(void *data, size_t size);

#endif
