/** The kernels of a step over kept rows: included where they are compiled. */
#pragma once

#include "device/attend_impl.cuh"
#include "hardkv/decode/attend/kernel.cuh"
#include "hardkv/decode/merge/kernel.cuh"
