#include "textflag.h"

// func rawVfork(args *cloneArgs) (pid, err uintptr)
//
// As syscall.rawVforkSyscall: the child shares the parent's stack, so the
// return address is kept in a register while the child runs on it.
TEXT ·rawVfork(SB),NOSPLIT|NOFRAME,$0-24
	MOVQ	args+0(FP), DI
	MOVQ	$88, SI	// sizeof(struct clone_args)
	MOVQ	$435, AX	// SYS_CLONE3
	POPQ	R12
	SYSCALL
	PUSHQ	R12
	CMPQ	AX, $0xfffffffffffff001
	JLS	ok
	MOVQ	$-1, pid+8(FP)
	NEGQ	AX
	MOVQ	AX, err+16(FP)
	RET
ok:
	MOVQ	AX, pid+8(FP)
	MOVQ	$0, err+16(FP)
	RET
