/* Copies that survive memory which has gone bad under them.
 *
 * A load from a poisoned line, or from a device that was taken away while it was mapped, is answered with SIGBUS. While a
 * thread copies, its two ranges are "trapped": a SIGBUS inside one of them jumps out of the copy, and everything else goes
 * to whoever handled the signal before (the default ends the process, as it did). Only the CPU's own faults count
 * (si_code > 0): a SIGBUS that somebody sent is passed on.
 *
 * The handler runs with SA_NODEFER, so that leaving it by a jump leaves no signal blocked, and costs no system call per
 * copy. The thread's state has the initial-exec model, so that the handler never allocates. */
#ifndef MOONPOOL_TRAP_H
#define MOONPOOL_TRAP_H
#include <setjmp.h>
#include <signal.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

typedef struct {
    sigjmp_buf back;
    uintptr_t start[2];
    uintptr_t end[2];
} mp_trap;

static __thread __attribute__((tls_model("initial-exec"))) mp_trap *volatile mp_trap_now;
static struct sigaction mp_trap_before;

static void mp_trap_hit(int number, siginfo_t *info, void *context) {
    mp_trap *trap = mp_trap_now;
    uintptr_t at = (uintptr_t)info->si_addr;
    int which;
    if (trap && info->si_code > 0)
        for (which = 0; which < 2; which++)
            if (at >= trap->start[which] && at < trap->end[which]) {
                mp_trap_now = NULL;
                siglongjmp(trap->back, which + 1);
            }
    if (mp_trap_before.sa_flags & SA_SIGINFO && mp_trap_before.sa_sigaction) {
        mp_trap_before.sa_sigaction(number, info, context);
        return;
    }
    if (mp_trap_before.sa_handler != SIG_DFL && mp_trap_before.sa_handler != SIG_IGN) {
        mp_trap_before.sa_handler(number);
        return;
    }
    /* Nobody's: with the default back in place the fault comes again at once and ends the process. */
    signal(number, SIG_DFL);
    if (info->si_code <= 0) raise(number);
}

/* Takes SIGBUS over, once: 0, or -1 with errno. Called with the GIL held. Another handler that is set later (faulthandler,
 * say) wins; calling this again then puts ours in front of it. */
static int mp_trap_install(void) {
    struct sigaction now, ours;
    if (sigaction(SIGBUS, NULL, &now) != 0) return -1;
    if (now.sa_flags & SA_SIGINFO && now.sa_sigaction == mp_trap_hit) return 0;
    memset(&ours, 0, sizeof ours);
    ours.sa_sigaction = mp_trap_hit;
    ours.sa_flags = SA_SIGINFO | SA_NODEFER | SA_ONSTACK;
    sigemptyset(&ours.sa_mask);
    mp_trap_before = now;
    return sigaction(SIGBUS, &ours, NULL);
}

/* Runs job(context). 0 when it returned, 1 when it touched bad memory in the first range, 2 when in the second. The job
 * must own nothing that a jump would lose. Ranges are widened to pages: the kernel may tell only the page. */
static int mp_trap_run(void (*job)(void *), void *context, const void *first, const void *second, size_t n) {
    mp_trap trap;
    const uintptr_t page = ~(uintptr_t)4095;
    int hit;
    trap.start[0] = (uintptr_t)first & page;
    trap.end[0] = ((uintptr_t)first + n + 4095) & page;
    trap.start[1] = (uintptr_t)second & page;
    trap.end[1] = ((uintptr_t)second + n + 4095) & page;
    hit = sigsetjmp(trap.back, 0);
    if (hit) return hit;
    mp_trap_now = &trap;
    job(context);
    mp_trap_now = NULL;
    return 0;
}
#endif
