/* The process that keeps a pod's sandbox open: it waits, reaps the orphans that
 * a shared process namespace hands to it, and ends on the first signal. */
#include <signal.h>
#include <sys/types.h>
#include <sys/wait.h>
#include <unistd.h>

static void leave(int signal) {
    (void)signal;
    _exit(0);
}

static void reap(int signal) {
    (void)signal;
    while (waitpid(-1, 0, WNOHANG) > 0) {
    }
}

int main(void) {
    signal(SIGINT, leave);
    signal(SIGTERM, leave);
    signal(SIGCHLD, reap);
    for (;;) {
        pause();
    }
}
