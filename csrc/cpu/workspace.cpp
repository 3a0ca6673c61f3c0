#include "workspace.h"

namespace kvoffload {
namespace {

constexpr std::int64_t kLine = 64;  // before `needed`, where its [-1] falls

template <class T>
void grow(std::vector<T>& buffer, std::int64_t size, T value) {
  if (static_cast<std::int64_t>(buffer.size()) < size) buffer.resize(static_cast<std::size_t>(size), value);
}

}  // namespace

void Workspace::reserve(std::int64_t slots, std::int64_t ids, std::int64_t partitions) {
  grow(needed_, kLine + slots, std::uint8_t{0});
  grow(pending_, ids + 16, std::int32_t{0});
  grow(displaced_used_, ids, std::int32_t{0});
  grow(partition_seen_, partitions, std::uint8_t{0});
  while ((std::int64_t{1} << displaced_bits_) < 2 * ids) ++displaced_bits_;
  grow(displaced_id_, std::int64_t{1} << displaced_bits_, std::int32_t{-1});
  grow(displaced_slot_, std::int64_t{1} << displaced_bits_, std::int32_t{-1});
}

Scratch Workspace::scratch() {
  return {needed_.data() + kLine, pending_.data(),        displaced_id_.data(),
          displaced_slot_.data(), displaced_used_.data(), displaced_bits_};
}

}  // namespace kvoffload
