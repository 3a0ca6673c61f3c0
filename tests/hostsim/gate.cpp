// MemFabric asks these two functions of its own which NPU driver there is. Loaded before it, this library answers in
// their place, with a driver of the newest known kind.
namespace ock::mf {
int HalGvaPrecheck() { return 0; }
int HybmGetGvaVersion() { return 3; }
}  // namespace ock::mf
