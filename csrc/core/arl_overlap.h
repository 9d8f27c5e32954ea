/* SPDX-License-Identifier: Apache-2.0 */
#ifndef ARL_CORE_OVERLAP_H
#define ARL_CORE_OVERLAP_H

#include "core/arl_view.h"

/* True when two different elements of one view may share a byte (an expanded or windowed view):
 * such a view cannot be written to as if its elements were apart. */
bool arl_overlap_self(const arl_view_t *view);

/*
 * True when some element of `a` shares a byte with one of `b`; neither overlaps itself. Exact
 * for slices of one tensor, which interleave without touching. Layouts that would take too long
 * to tell apart count as overlapping.
 */
bool arl_overlap_views(const arl_view_t *a, const arl_view_t *b);

/* True when both are the very same elements in the same order. */
bool arl_overlap_same(const arl_view_t *a, const arl_view_t *b);

#endif
