// Runs every test, or those whose name holds the first argument.
#include "harness.h"

int main(int argc, char** argv) {
  int run = 0;
  for (const testing::Test& test : testing::tests()) {
    if (argc > 1 && !std::strstr(test.name, argv[1])) continue;
    const int before = testing::failures();
    test.body();
    ++run;
    if (testing::failures() != before) std::fprintf(stderr, "FAILED %s\n", test.name);
  }
  std::printf("%d tests, %d failures\n", run, testing::failures());
  return run == 0 || testing::failures() > 0;
}
