// Ordering between the pipes of one core.
#pragma once

#include "kernel_operator.h"

// What the first pipe was given before happens before what the second is given after. EVENT: e.g. MTE2_S. A macro, so
// that each use is a call site of its own: the mutation test removes them one by one.
#define KVOFFLOAD_ORDER(EVENT)                                                                                \
  do {                                                                                                        \
    using namespace AscendC;                                                                                  \
    const auto kvoffload_event = static_cast<TEventID>(GetTPipePtr()->FetchEventID(HardEvent::EVENT));        \
    SetFlag<HardEvent::EVENT>(kvoffload_event);                                                               \
    WaitFlag<HardEvent::EVENT>(kvoffload_event);                                                              \
  } while (false)
