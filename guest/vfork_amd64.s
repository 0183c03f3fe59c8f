#include "textflag.h"

// func rawVfork(flags uintptr) (pid, err uintptr)
//
// As syscall.rawVforkSyscall: the child shares the parent's stack, so the
// return address is kept in a register while the child runs on it.
TEXT ·rawVfork(SB),NOSPLIT|NOFRAME,$0-24
	MOVQ	flags+0(FP), DI
	MOVQ	$0, SI
	MOVQ	$0, DX
	MOVQ	$0, R10
	MOVQ	$0, R8
	MOVQ	$0, R9
	MOVQ	$56, AX	// SYS_CLONE
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
