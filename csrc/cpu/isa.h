// Instruction set of the plan kernels, selected once for the process; tests may change it.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace kvoffload {

enum class Isa : int { kPortable = 0, kAvx2 = 1, kAvx512 = 2, kNeon = 3 };

std::string_view isa_name(Isa isa);
std::vector<Isa> available_isas();  // worst first; compiled in and supported by this processor
Isa current_isa();
// "auto" takes the best. Throws std::invalid_argument when the name is unknown or the processor lacks it.
void set_isa(const std::string& name);

}  // namespace kvoffload
