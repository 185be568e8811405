// A thread of a block that touches memory that isn't there: its launch ends with an error, the process goes on. Knows nothing
// of kernels. The handler moves the thread to `crashed` and returns; stacks that ran over are told apart by the address.
#include <csignal>
#include <ucontext.h>

#include "runtime.h"

namespace baton::simt {

namespace {

struct sigaction before_segv, before_bus;
alignas(64) char handler_stack[64 * 1024];
void* touched = nullptr;
bool ran_over = false;

void crashed() {
  if (ran_over) fail("thread %d's stack of %zu bytes ran over", running->now->id, STACK_BYTES);
  fail("thread %d of block (%u, %u, %u) touched memory that isn't there: %p", running->now->id, running->now->block->index.x,
       running->now->block->index.y, running->now->block->index.z, touched);
}

void on_fault(int signal, siginfo_t* info, void* context) {
  if (!running || !running->now) {
    sigaction(signal, signal == SIGSEGV ? &before_segv : &before_bus, nullptr);
    return;  // not ours: it faults again, and whoever was here before has it
  }
  touched = info->si_addr;
  auto& machine = static_cast<ucontext_t*>(context)->uc_mcontext;
  const auto top = reinterpret_cast<uintptr_t>(running->now->stack) + STACK_BYTES - 4096;
  const auto at = reinterpret_cast<uintptr_t>(info->si_addr) - reinterpret_cast<uintptr_t>(running->now->stack);
  ran_over = at < 4096;
#if defined(__x86_64__)
  machine.gregs[REG_RSP] = greg_t(top - 8);
  machine.gregs[REG_RIP] = greg_t(reinterpret_cast<uintptr_t>(&crashed));
#else
  machine.sp = top;
  machine.pc = reinterpret_cast<uintptr_t>(&crashed);
#endif
}

}  // namespace

Faults::Faults() {
  stack_t mine{};
  mine.ss_sp = handler_stack, mine.ss_size = sizeof handler_stack;
  sigaltstack(&mine, &before_);
  struct sigaction action {};
  action.sa_sigaction = on_fault;
  action.sa_flags = SA_SIGINFO | SA_ONSTACK;
  sigaction(SIGSEGV, &action, &before_segv);
  sigaction(SIGBUS, &action, &before_bus);
}

Faults::~Faults() {
  sigaction(SIGSEGV, &before_segv, nullptr);
  sigaction(SIGBUS, &before_bus, nullptr);
  sigaltstack(&before_, nullptr);
}

}  // namespace baton::simt
