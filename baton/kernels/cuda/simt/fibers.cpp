// Stacks, the shared memory of resident blocks, and the switch from one stack to another. Knows nothing of who runs when.
#include <sys/mman.h>

#include "runtime.h"

namespace baton::simt {

char* arena = nullptr;
size_t arena_bytes = 0;

namespace {

char* stacks = nullptr;
size_t stack_count = 0;

#if defined(__x86_64__)
asm(R"(
.text
.hidden baton_simt_switch
.globl baton_simt_switch
baton_simt_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
)");
#elif defined(__aarch64__)
asm(R"(
.text
.hidden baton_simt_switch
.globl baton_simt_switch
baton_simt_switch:
  sub sp, sp, #160
  stp x19, x20, [sp, #0]
  stp x21, x22, [sp, #16]
  stp x23, x24, [sp, #32]
  stp x25, x26, [sp, #48]
  stp x27, x28, [sp, #64]
  stp x29, x30, [sp, #80]
  stp d8, d9, [sp, #96]
  stp d10, d11, [sp, #112]
  stp d12, d13, [sp, #128]
  stp d14, d15, [sp, #144]
  mov x9, sp
  str x9, [x0]
  mov sp, x1
  ldp x19, x20, [sp, #0]
  ldp x21, x22, [sp, #16]
  ldp x23, x24, [sp, #32]
  ldp x25, x26, [sp, #48]
  ldp x27, x28, [sp, #64]
  ldp x29, x30, [sp, #80]
  ldp d8, d9, [sp, #96]
  ldp d10, d11, [sp, #112]
  ldp d12, d13, [sp, #128]
  ldp d14, d15, [sp, #144]
  add sp, sp, #160
  ret
)");
#else
#error "the SIMT shim switches fibers on x86-64 and aarch64"
#endif

void* mapped(size_t bytes) {
  void* at = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  return at == MAP_FAILED ? nullptr : at;
}

}  // namespace

void prepare(Fiber& fiber, size_t number, void (*main)()) {
  char* stack = fiber.stack = stacks + number * STACK_BYTES;
  auto** top = reinterpret_cast<void**>(stack + STACK_BYTES) - 2;
#if defined(__x86_64__)
  *--top = nullptr;  // a return address for main: the stack is aligned as after a call
  *--top = reinterpret_cast<void*>(main);
  for (int i = 0; i < 6; i++) *--top = nullptr;
#else
  top -= 20;
  for (int i = 0; i < 20; i++) top[i] = nullptr;
  top[11] = reinterpret_cast<void*>(main);
#endif
  fiber.stack_pointer = top;
}

bool grow(size_t threads, size_t blocks) {
  if (stack_count < threads) {
    if (stacks) munmap(stacks, stack_count * STACK_BYTES);
    stacks = static_cast<char*>(mapped(threads * STACK_BYTES));
    stack_count = stacks ? threads : 0;
    for (size_t i = 0; i < stack_count; i++) mprotect(stacks + i * STACK_BYTES, 4096, PROT_NONE);
  }
  if (arena_bytes < blocks * SHARED_SLOT) {
    if (arena) munmap(arena, arena_bytes);
    arena = static_cast<char*>(mapped(blocks * SHARED_SLOT));
    arena_bytes = arena ? blocks * SHARED_SLOT : 0;
  }
  return stacks && arena;
}

void shrink() {
  if (stacks) munmap(stacks, stack_count * STACK_BYTES);
  if (arena) munmap(arena, arena_bytes);
  stacks = arena = nullptr, stack_count = arena_bytes = 0;
}

}  // namespace baton::simt
