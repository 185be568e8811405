// Memory that processes share as cards' memory is shared by a handle: the owner's process and descriptor. Knows nothing of what lies in it.
#pragma once
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstdio>
#include <cstring>
#include <map>

namespace baton::simt {

constexpr size_t HANDLE_BYTES = 64;  // cudaIpcMemHandle_t
constexpr int NO_ROOM = 2;           // cudaErrorMemoryAllocation

inline std::map<char*, int>& own_rooms() {
  static std::map<char*, int> all;  // descriptors, by address
  return all;
}

inline int map_room(int fd, size_t bytes, char** room) {
  void* found = fd < 0 ? MAP_FAILED : mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (found == MAP_FAILED) return NO_ROOM;
  return *room = static_cast<char*>(found), 0;
}

inline int room_make(size_t bytes, char** room, char* handle) {
  const int fd = memfd_create("baton-room", MFD_CLOEXEC);  // gone with its last user, however that ends
  if (fd < 0 || ftruncate(fd, off_t(bytes)) || map_room(fd, bytes, room)) return NO_ROOM;
  own_rooms()[*room] = fd;
  std::memset(handle, 0, HANDLE_BYTES);
  std::snprintf(handle, HANDLE_BYTES, "/proc/%d/fd/%d", int(getpid()), fd);
  return 0;
}

inline int room_open(const char* handle, size_t bytes, char** room) {
  const int fd = open(handle, O_RDWR | O_CLOEXEC);
  const int wrong = map_room(fd, bytes, room);
  if (fd >= 0) close(fd);
  return wrong;
}

inline int room_close(char* room, size_t bytes) {
  if (const auto found = own_rooms().find(room); found != own_rooms().end()) close(found->second), own_rooms().erase(found);
  return munmap(room, bytes) ? 1 : 0;
}

}  // namespace baton::simt
