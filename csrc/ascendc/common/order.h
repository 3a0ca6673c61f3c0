// Ordering between the pipes of one core.
#pragma once

#include "kernel_operator.h"

// Orders earlier work of the first pipe before later work of the second. EVENT: e.g. MTE2_S. A macro, so that each use
// is a separate call site: the mutation test removes them one by one.
#define KVOFFLOAD_ORDER(EVENT)                                                                                \
  do {                                                                                                        \
    using namespace AscendC;                                                                                  \
    const auto kvoffload_event = static_cast<TEventID>(GetTPipePtr()->FetchEventID(HardEvent::EVENT));        \
    SetFlag<HardEvent::EVENT>(kvoffload_event);                                                               \
    WaitFlag<HardEvent::EVENT>(kvoffload_event);                                                              \
  } while (false)
