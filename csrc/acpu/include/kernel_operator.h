// The twin's stand-in for CANN's header of this name: the part of the AscendC API that docs/acpu.md lists.
#pragma once

#include "acpu_ascendc/compare.h"
#include "acpu_ascendc/copy.h"
#include "acpu_ascendc/gather.h"
#include "acpu_ascendc/pipe.h"
#include "acpu_ascendc/reduce.h"
#include "acpu_ascendc/sync.h"
#include "acpu_ascendc/tensor.h"
#include "acpu_ascendc/types.h"
#include "acpu_ascendc/vector.h"
