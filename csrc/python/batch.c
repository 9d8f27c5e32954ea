/* SPDX-License-Identifier: Apache-2.0 */
#include "python/state.h"

PyMethodDef arl_batch_methods[] = {{NULL, NULL, 0, NULL}};

int
arl_batch_exec(PyObject *module, arl_state_t *state)
{
    (void)module;
    (void)state;
    return 0;
}
