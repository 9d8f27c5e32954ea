# SPDX-License-Identifier: Apache-2.0
from tensordict import NonTensorData, TensorDict


def get_tensordict(tensor_dict, non_tensor_dict):
    size = [len(next(iter(tensor_dict.values())))] if tensor_dict else []
    made = TensorDict(dict(tensor_dict), batch_size=size)
    return assign_non_tensor(made, **non_tensor_dict)


def assign_non_tensor(data, **values):
    for key, value in values.items():
        data[key] = NonTensorData(value, batch_size=data.batch_size)
    return data


def get(data, key, default=None):
    return data.get(key, default)
