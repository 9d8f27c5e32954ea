/* SPDX-License-Identifier: Apache-2.0 */
#ifndef ARL_PYTHON_CLIENT_CHECK_H
#define ARL_PYTHON_CLIENT_CHECK_H

#include "python/client.h"

/*
 * What no server of the contract takes, found before it is sent. Each returns 0, or -1 with an
 * exception that names the call, the key, what was found and what is wanted: TypeError for an
 * argument of the wrong kind, PayloadError for everything else.
 */

/* `params` is the merged dict. Names that are not known here pass, None passes everywhere. */
int arl_client_check_sampling(const arl_client_t *client, PyObject *params);

/* `level` may be NULL: 1. A new int, or NULL. */
PyObject *arl_client_check_level(const arl_client_t *client, PyObject *level);

int arl_client_check_tags(const arl_client_t *client, PyObject *tags);

/* Arguments of save_checkpoint and load_checkpoint. A path object in `keywords` becomes text. */
int arl_client_check_checkpoint(const arl_client_t *client, const char *operation,
                                PyObject *keywords);

#endif
