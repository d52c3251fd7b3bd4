// Runs the kernels without any framework, for sanitizers and emulators:
//
//   driver [--isa NAME] [--but FAMILY] [FAMILY ...]
//
// Without --isa every instruction set of this processor is run; with it, that one alone, whether the processor has it
// or not. Ends with 0 if nothing was wrong.
#include <cstdio>
#include <cstring>
#include <vector>

#include "harness.h"

namespace dcprt::test {
namespace {

struct Family {
  const char* name;
  void (*run)();
};

constexpr Family kFamilies[] = {
    {"threads", TestThreads},
    {"shm", TestShm},
#if !defined(__SANITIZE_THREAD__)  // which does not follow forks; the others share nothing but the thread pool
    {"fork", TestFork},
    {"elementwise", TestElementwise},
    {"linear", TestLinear},
    {"coded", TestCoded},
    {"fused", TestFused},
    {"merge", TestMerge},
    {"pages", TestPages},
    {"sampling", TestSampling},
    {"attention", TestAttention},
    {"layer", TestLayer},
#endif
};

struct Options {
  const char *isa = nullptr, *but = nullptr;
  std::vector<const char*> families;

  bool Wants(const char* family) const {
    if (but != nullptr && std::strcmp(but, family) == 0) return false;
    bool wanted = families.empty();
    for (const char* name : families) wanted = wanted || std::strcmp(name, family) == 0;
    return wanted;
  }
};

Options Parse(int argc, char** argv) {
  Options options;
  for (int i = 1; i < argc; ++i) {
    if (i + 1 < argc && std::strcmp(argv[i], "--isa") == 0) {
      options.isa = argv[++i];
    } else if (i + 1 < argc && std::strcmp(argv[i], "--but") == 0) {
      options.but = argv[++i];
    } else {
      options.families.push_back(argv[i]);
    }
  }
  return options;
}

bool ChooseIsas(const char* only) {
  size_t index = 0;
  for (const char* name : kIsaNames) {
    const bool wanted = only == nullptr ? index < PossibleIsas().size() : std::strcmp(only, name) == 0;
    if (wanted) Isas().push_back(static_cast<Isa>(index));
    ++index;
  }
  return !Isas().empty();
}

int Run(const Options& options) {
  if (!ChooseIsas(options.isa)) {
    std::fprintf(stderr, "there is no instruction set %s\n", options.isa);
    return 2;
  }
  std::printf("instruction sets:");
  for (const Isa isa : Isas()) std::printf(" %s", NameOf(isa));
  std::printf("\n");
  for (const Family& family : kFamilies) {
    if (!options.Wants(family.name)) continue;
    const Tally before = Tally::Get();
    family.run();
    const Tally& after = Tally::Get();
    std::printf("%-12s %6ld checks, %ld wrong\n", family.name, after.checked - before.checked,
                after.wrong - before.wrong);
    std::fflush(stdout);
  }
  return Tally::Get().wrong == 0 && Tally::Get().checked > 0 ? 0 : 1;
}

}  // namespace
}  // namespace dcprt::test

int main(int argc, char** argv) { return dcprt::test::Run(dcprt::test::Parse(argc, argv)); }
