/* SPDX-License-Identifier: Apache-2.0 */
#include "python/state.h"

PyMethodDef arl_payload_methods[] = {{NULL, NULL, 0, NULL}};

int
arl_payload_exec(PyObject *module, arl_state_t *state)
{
    (void)module;
    (void)state;
    return 0;
}
