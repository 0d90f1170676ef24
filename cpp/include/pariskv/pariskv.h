/**
 * pariskv: the KV cache of a language model that answers
 * "attend, but only to what matters".
 *
 * Include this header and link `pariskv::core`. The parts, in the order in
 * which they build on each other:
 */
#pragma once

#include "pariskv/version.h"

#include "pariskv/error.h"
#include "pariskv/sizes.h"
#include "pariskv/stream.h"
#include "pariskv/tensor_view.h"

#include "pariskv/executor.h"
#include "pariskv/memory.h"

#include "pariskv/borrowed.h"
#include "pariskv/config.h"
#include "pariskv/policies.h"
#include "pariskv/stats.h"

#include "pariskv/cache.h"
#include "pariskv/codec.h"
