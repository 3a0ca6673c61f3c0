// dsa_plan: one residency decision per index group and step. Semantics: vllm_kvoffload/ops/oracle/plan.py.
#pragma once

#include "residency.h"
#include "workspace.h"

namespace kvoffload {

// Throws std::invalid_argument for ways, sets or slots that no plan is made for.
void check_residency(const ResidencyView& residency);

// Throws std::invalid_argument, naming the argument, before any state or output is written.
void dsa_plan(const PlanInput& input, const ResidencyView& residency, const PlanOutput& out, Workspace& workspace);

}  // namespace kvoffload
