/* Loaded in front of the C library: makes one write to the disk slow, the first after the file E2E_SLOW_DISK has appeared. */
#define _GNU_SOURCE
#include <stdio.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

/* Shorter than the 2 s after which Berth calls its disk hung. */
static const struct timespec SLOW = {1, 500000000};

int fdatasync(int fd) {
  const char *armed = getenv("E2E_SLOW_DISK");
  char now[4096];
  if (armed && snprintf(now, sizeof now, "%s.now", armed) < (int)sizeof now && rename(armed, now) == 0) {
    nanosleep(&SLOW, NULL);
    unlink(now);
  }
  return (int)syscall(SYS_fdatasync, fd);
}
