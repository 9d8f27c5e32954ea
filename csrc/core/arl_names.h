/* SPDX-License-Identifier: Apache-2.0 */
#ifndef ARL_CORE_NAMES_H
#define ARL_CORE_NAMES_H

#include "core/arl_status.h"

#include <stdbool.h>

/* A hash table from names to their numbers, built once and then only read. Names are borrowed:
 * they must outlive it. Zero-initialised it is empty, and free is safe. */
typedef struct arl_names {
    struct arl_names_slot *slots;
    uint32_t mask;
} arl_names_t;

arl_status_t arl_names_init(arl_names_t *names, uint32_t capacity, arl_error_t *err);

/* Adds `name` with `number`, unless it is there. Returns the number it has now, so a result
 * other than `number` tells of a repetition. Never more than `capacity` names. */
uint32_t arl_names_add(arl_names_t *names, const char *name, uint32_t length, uint32_t number);

/* False when it is not there. */
bool arl_names_find(const arl_names_t *names, const char *name, uint32_t length,
                    uint32_t *number_p);

void arl_names_free(arl_names_t *names);

#endif
