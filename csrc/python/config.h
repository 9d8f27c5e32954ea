/* SPDX-License-Identifier: Apache-2.0 */
#ifndef ARL_PYTHON_CONFIG_H
#define ARL_PYTHON_CONFIG_H

#include "python/state.h"

/*
 * The main configuration as a new plain dict in its normalised form, from a dict, any other
 * mapping, or an OmegaConf container. NULL with ConfigError set when it is not a valid one.
 * Accepts its own result unchanged.
 */
PyObject *arl_config_normalize(arl_state_t *state, PyObject *mapping);

#endif
