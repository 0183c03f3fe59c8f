package doctor

import (
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"unsafe"

	"golang.org/x/sys/unix"
)

// The part of the KVM interface that the probe uses (linux/kvm.h).
const (
	kvmGetAPIVersion       = 0xae00
	kvmCreateVM            = 0xae01
	kvmGetVCPUMmapSize     = 0xae04
	kvmSetTSSAddr          = 0xae47
	kvmSetUserMemoryRegion = 0x4020ae46
	kvmCreateVCPU          = 0xae41
	kvmRun                 = 0xae80
	kvmSetRegs             = 0x4090ae82
	kvmGetSregs            = 0x8138ae83
	kvmSetSregs            = 0x4138ae84

	kvmAPIVersion = 12

	exitIO            = 2
	exitHLT           = 5
	exitShutdown      = 8
	exitFailEntry     = 9
	exitInternalError = 17
)

type kvmMemoryRegion struct {
	slot, flags   uint32
	guestPhysAddr uint64
	memorySize    uint64
	userspaceAddr uint64
}

type kvmRegs struct {
	rax, rbx, rcx, rdx, rsi, rdi, rsp, rbp uint64
	r8, r9, r10, r11, r12, r13, r14, r15   uint64
	rip, rflags                            uint64
}

type kvmSegment struct {
	base                          uint64
	limit                         uint32
	selector                      uint16
	typ, present, dpl, db, s, l   uint8
	g, avl, unusable, unusedByte_ uint8
}

type kvmDtable struct {
	base  uint64
	limit uint16
	_     [3]uint16
}

type kvmSregs struct {
	cs, ds, es, fs, gs, ss, tr, ldt kvmSegment
	gdt, idt                        kvmDtable
	cr0, cr2, cr3, cr4, cr8         uint64
	efer, apicBase                  uint64
	interrupts                      [4]uint64
}

// guestMemory is one slot at guest address 0: page tables, then code.
const (
	guestMemory = 1 << 16
	pml4        = 0x1000
	pdpt        = 0x2000
	pd          = 0x3000
	guestCode   = 0x4000
	probePort   = 0x10
)

// Two programs. The first is the smallest there is. The second uses an
// instruction that a processor runs and KVM's emulator does not know: where a
// guest's kernel is interpreted instead of run, as under nested paravirtual
// KVM, the first works and a real kernel still never boots.
var (
	realModeCode = []byte{
		0xb0, 0x42, // mov al, 0x42
		0xe6, probePort, // out 0x10, al
		0xf4, // hlt
	}
	longModeCode = []byte{
		0x48, 0xc7, 0xc3, 0xff, 0xff, 0x00, 0x00, // mov rbx, 0xffff
		0xf3, 0x48, 0x0f, 0xb8, 0xc3, // popcnt rax, rbx
		0xe6, probePort, // out 0x10, al
		0xf4, // hlt
	}
)

// probeKVM runs both programs. It may hang, and is therefore run as a child.
func probeKVM() error {
	dev, err := os.OpenFile("/dev/kvm", os.O_RDWR, 0)
	if err != nil {
		return err
	}
	defer dev.Close()
	version, err := ioctl(dev.Fd(), kvmGetAPIVersion, 0)
	if err != nil {
		return fmt.Errorf("ask the version: %w", err)
	}
	if version != kvmAPIVersion {
		return fmt.Errorf("KVM API version %d instead of %d", version, kvmAPIVersion)
	}
	if err := runGuest(dev.Fd(), realModeCode, 0x42, realMode); err != nil {
		return fmt.Errorf("a guest in real mode: %w", err)
	}
	if err := runGuest(dev.Fd(), longModeCode, 16, longMode); err != nil {
		return fmt.Errorf("a guest in 64-bit mode: %w", err)
	}
	return nil
}

func ioctl(fd uintptr, request uintptr, arg uintptr) (uintptr, error) {
	for {
		r, _, errno := unix.Syscall(unix.SYS_IOCTL, fd, request, arg)
		switch errno {
		case 0:
			return r, nil
		case unix.EINTR, unix.EAGAIN:
			continue // Go's own signals
		}
		return 0, errno
	}
}

// runGuest runs code in a machine of its own and wants the byte out on probePort.
func runGuest(dev uintptr, code []byte, want byte, mode func(*kvmSregs, []byte)) error {
	vm, err := ioctl(dev, kvmCreateVM, 0)
	if err != nil {
		return fmt.Errorf("make a machine: %w", err)
	}
	defer unix.Close(int(vm))
	ioctl(vm, kvmSetTSSAddr, 0xfffbd000) // wanted by Intel processors, refused by no other
	mem, err := unix.Mmap(-1, 0, guestMemory, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED|unix.MAP_ANONYMOUS)
	if err != nil {
		return err
	}
	defer unix.Munmap(mem)
	copy(mem[guestCode:], code)
	region := kvmMemoryRegion{memorySize: guestMemory, userspaceAddr: uint64(uintptr(unsafe.Pointer(&mem[0])))}
	if _, err := ioctl(vm, kvmSetUserMemoryRegion, uintptr(unsafe.Pointer(&region))); err != nil {
		return fmt.Errorf("give it memory: %w", err)
	}
	cpu, err := ioctl(vm, kvmCreateVCPU, 0)
	if err != nil {
		return fmt.Errorf("make a processor: %w", err)
	}
	defer unix.Close(int(cpu))
	size, err := ioctl(dev, kvmGetVCPUMmapSize, 0)
	if err != nil {
		return err
	}
	run, err := unix.Mmap(int(cpu), 0, int(size), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		return err
	}
	defer unix.Munmap(run)

	var sregs kvmSregs
	if _, err := ioctl(cpu, kvmGetSregs, uintptr(unsafe.Pointer(&sregs))); err != nil {
		return fmt.Errorf("read its registers: %w", err)
	}
	mode(&sregs, mem)
	if _, err := ioctl(cpu, kvmSetSregs, uintptr(unsafe.Pointer(&sregs))); err != nil {
		return fmt.Errorf("set its mode: %w", err)
	}
	regs := kvmRegs{rip: guestCode, rflags: 2, rsp: guestMemory - 16}
	if _, err := ioctl(cpu, kvmSetRegs, uintptr(unsafe.Pointer(&regs))); err != nil {
		return fmt.Errorf("set its registers: %w", err)
	}
	seen := false
	for range 8 {
		if _, err := ioctl(cpu, kvmRun, 0); err != nil {
			return fmt.Errorf("run it: %w", err)
		}
		// struct kvm_run: exit_reason at 8, the union of reasons at 32.
		switch reason := binary.LittleEndian.Uint32(run[8:]); reason {
		case exitIO:
			port := binary.LittleEndian.Uint16(run[34:])
			data := binary.LittleEndian.Uint64(run[40:])
			if port != probePort || data >= uint64(len(run)) || run[data] != want {
				return errors.New("it computed something else")
			}
			seen = true
		case exitHLT:
			if !seen {
				return errors.New("it stopped without a result")
			}
			return nil
		case exitInternalError, exitFailEntry, exitShutdown:
			return fmt.Errorf("KVM cannot run it (exit reason %d)", reason)
		default:
			return fmt.Errorf("unexpected exit reason %d", reason)
		}
	}
	return errors.New("it does not stop")
}

func realMode(s *kvmSregs, _ []byte) {
	s.cs.base, s.cs.selector = 0, 0
}

// longMode maps the first 2 MiB onto themselves and sets what a kernel would
// have set on its way to 64-bit mode.
func longMode(s *kvmSregs, mem []byte) {
	const present, writable, large = 1, 2, 1 << 7
	binary.LittleEndian.PutUint64(mem[pml4:], pdpt|present|writable)
	binary.LittleEndian.PutUint64(mem[pdpt:], pd|present|writable)
	binary.LittleEndian.PutUint64(mem[pd:], present|writable|large)
	s.cr3 = pml4
	s.cr4 = 1 << 5                // PAE
	s.cr0 = 1<<31 | 1<<16 | 1<<0  // PG, WP, PE
	s.efer = 1<<8 | 1<<10 | 1<<11 // LME, LMA, NXE
	s.cs = kvmSegment{limit: 0xffffffff, selector: 8, typ: 11, present: 1, s: 1, l: 1, g: 1}
	data := kvmSegment{limit: 0xffffffff, selector: 16, typ: 3, present: 1, s: 1, db: 1, g: 1}
	s.ds, s.es, s.fs, s.gs, s.ss = data, data, data, data, data
}
