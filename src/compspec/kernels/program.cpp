// Runs a recorded program: calls of functions with fixed arguments, in order, by one team of threads.

#include <atomic>
#include <cstdint>
#include <utility>

#include "team.h"

namespace {
using compspec::Team;
using i64 = std::int64_t;

constexpr int MOST_ARGUMENTS = 32;

enum Kind { KIND_ALONE, KIND_TEAM };

struct Call {
  i64 kind;
  void* function;
  // KIND_ALONE: MOST_ARGUMENTS pointers, those beyond the function's own unused. KIND_TEAM: what the function takes.
  void* arguments;
};

template <int... I>
void call_alone(void* function, void* const* a, std::integer_sequence<int, I...>) {
  // Arguments beyond those that a function knows do no harm where the caller removes them, as in the C conventions of
  // x86-64 and AArch64.
  reinterpret_cast<void (*)(decltype(static_cast<void>(I), static_cast<void*>(nullptr))...)>(function)(a[I]...);
}

int run_alone(const Call& call) {
  try {
    call_alone(call.function, static_cast<void**>(call.arguments),
               std::make_integer_sequence<int, MOST_ARGUMENTS>{});
    return 0;
  } catch (...) {
    return 1;
  }
}

int run_in_team(const Call& call, const Team& team) {
  return reinterpret_cast<compspec::TeamFunction>(call.function)(call.arguments, &team);
}

}  // namespace

// `together`: one team goes through all calls, and what one thread does alone the others wait for. Else each call makes
// its own. Returns 0, or 1 where a function threw.
extern "C" int compspec_program_run(const Call* calls, i64 count, int threads, int together) {
  std::atomic<int> failed{0};
  const auto run = [&](const Call& call, const Team& team) {
    if (call.kind == KIND_TEAM) {
      if (run_in_team(call, team)) failed = 1;
    } else if (team.thread == 0) {
      if (run_alone(call)) failed = 1;
    }
  };
  if (together) {
    compspec::in_team(threads, [&](const Team& team) {
      for (i64 i = 0; i < count; ++i) {
        run(calls[i], team);
        team.wait();
      }
    });
  } else {
    for (i64 i = 0; i < count; ++i) {
      const bool alone = calls[i].kind == KIND_ALONE;
      compspec::in_team(alone ? 1 : threads, [&](const Team& team) { run(calls[i], team); });
    }
  }
  return failed;
}
