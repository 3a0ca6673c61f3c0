/* Preloaded into a MetaService under test: its lock file, which is always in /tmp and lets one service run on a
 * machine, is opened in $TMPDIR instead. So tests can run beside each other, and beside a service in use. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const char kLock[] = "/tmp/mmc_meta_service";

typedef int (*Open)(const char *, int, ...);

static int open_redirected(const char *name, const char *path, int flags, int mode) {
  char moved[4096];
  const char *folder = getenv("TMPDIR");
  if (folder != NULL && strncmp(path, kLock, sizeof kLock - 1) == 0) {
    snprintf(moved, sizeof moved, "%s/%s", folder, path + sizeof "/tmp/" - 1);
    path = moved;
  }
  Open next;
  *(void **)&next = dlsym(RTLD_NEXT, name);
  return next(path, flags, mode);
}

#define REDIRECT(name)                        \
  int name(const char *path, int flags, ...) { \
    va_list arguments;                        \
    va_start(arguments, flags);               \
    const int mode = va_arg(arguments, int);  \
    va_end(arguments);                        \
    return open_redirected(#name, path, flags, mode); \
  }

REDIRECT(open)
REDIRECT(open64)
