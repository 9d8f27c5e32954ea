/* SPDX-License-Identifier: Apache-2.0 */
#ifndef ARL_CORE_PAGES_H
#define ARL_CORE_PAGES_H

#include <stdbool.h>
#include <stddef.h>

/*
 * Large memory that is about to be written from end to end. Most of the cost of filling it is
 * the page faults of the first touch; a huge page (2 MiB) takes one where small pages take 512.
 * All of this is advice: where the system has no huge pages it works the same, only slower.
 */

/* For memory that somebody else allocated. Small blocks are left alone. */
void arl_pages_prefer_huge(void *data, size_t size);

/* True when memory of that size is worth pages of its own. */
bool arl_pages_worthwhile(size_t size);

/* Zeroed memory that starts on a huge page, and ends on one where that saves faults; NULL with
 * errno when there is none. Unlike malloc's, it never lies across half a huge page at each end,
 * and goes back to the system when freed. */
void *arl_pages_alloc(size_t size);
void arl_pages_free(void *data, size_t size);

#endif
