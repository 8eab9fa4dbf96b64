//! seccomp: system calls that neither the gateway nor a driver of DPDK makes fail with EPERM.
//!
//! A list of what is forbidden, not of what is allowed: drivers, the C library and programs that a kubeconfig names make
//! calls that no test here has seen. The unit and the Pod have lists of what is allowed, which an operator can change.

use std::collections::BTreeMap;
use std::env::consts::ARCH;

use libc::c_long;
use seccompiler::{
    BpfProgram, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompFilter, SeccompRule, TargetArch,
    apply_filter,
};

use super::needs::PortNeeds;

/// Forbidden with every configuration.
const FORBIDDEN: &[c_long] = &[
    // Other processes.
    libc::SYS_ptrace,
    libc::SYS_process_vm_readv,
    libc::SYS_process_vm_writev,
    libc::SYS_pidfd_getfd,
    libc::SYS_kcmp,
    libc::SYS_perf_event_open,
    // The kernel.
    libc::SYS_init_module,
    libc::SYS_finit_module,
    libc::SYS_delete_module,
    libc::SYS_kexec_load,
    libc::SYS_reboot,
    libc::SYS_syslog,
    libc::SYS_acct,
    libc::SYS_swapon,
    libc::SYS_swapoff,
    libc::SYS_quotactl,
    libc::SYS_settimeofday,
    libc::SYS_clock_settime,
    libc::SYS_clock_adjtime,
    libc::SYS_adjtimex,
    libc::SYS_sethostname,
    libc::SYS_setdomainname,
    // File systems and namespaces.
    libc::SYS_mount,
    libc::SYS_umount2,
    libc::SYS_pivot_root,
    libc::SYS_chroot,
    libc::SYS_open_tree,
    libc::SYS_move_mount,
    libc::SYS_fsopen,
    libc::SYS_fsconfig,
    libc::SYS_fsmount,
    libc::SYS_fspick,
    libc::SYS_mount_setattr,
    libc::SYS_unshare,
    libc::SYS_setns,
    libc::SYS_open_by_handle_at,
    libc::SYS_fanotify_init,
    // Parts of the kernel that have been attacked often.
    libc::SYS_add_key,
    libc::SYS_request_key,
    libc::SYS_keyctl,
    libc::SYS_userfaultfd,
    libc::SYS_io_uring_setup,
    libc::SYS_io_uring_enter,
    libc::SYS_io_uring_register,
    libc::SYS_personality,
];

/// Forbidden unless a port needs raw input and output.
#[cfg(target_arch = "x86_64")]
const RAW_IO: &[c_long] = &[libc::SYS_iopl, libc::SYS_ioperm];
#[cfg(not(target_arch = "x86_64"))]
const RAW_IO: &[c_long] = &[];

/// `clone` with one of these makes a namespace.
const NAMESPACES: [libc::c_int; 7] = [
    libc::CLONE_NEWNS,
    libc::CLONE_NEWCGROUP,
    libc::CLONE_NEWUTS,
    libc::CLONE_NEWIPC,
    libc::CLONE_NEWUSER,
    libc::CLONE_NEWPID,
    libc::CLONE_NEWNET,
];

/// `mknodat` makes one of these; it makes FIFOs too, by which keepalived tells what it does.
const DEVICES: [libc::mode_t; 2] = [libc::S_IFCHR, libc::S_IFBLK];

/// Forbids them to the calling thread and those that it starts.
pub(super) fn forbid(needs: PortNeeds) -> Result<(), String> {
    let mut rules: BTreeMap<c_long, Vec<SeccompRule>> = forbidden(needs).map(|call| (call, Vec::new())).collect();
    rules.insert(libc::SYS_clone, NAMESPACES.into_iter().map(makes).collect::<Result<_, _>>()?);
    rules.insert(libc::SYS_mknodat, DEVICES.into_iter().map(makes_device).collect::<Result<_, _>>()?);
    apply(rules, libc::EPERM)?;
    // The flags of clone3 are in memory, which a filter cannot read. The C library takes clone instead.
    apply(BTreeMap::from([(libc::SYS_clone3, Vec::new())]), libc::ENOSYS)
}

fn forbidden(needs: PortNeeds) -> impl Iterator<Item = c_long> {
    let bpf = (!needs.bpf).then_some(libc::SYS_bpf);
    let raw_io: &[c_long] = if needs.raw_io { &[] } else { RAW_IO };
    FORBIDDEN.iter().chain(raw_io).copied().chain(bpf)
}

/// A call with this flag in its first argument.
fn makes(namespace: libc::c_int) -> Result<SeccompRule, String> {
    let flag = u64::from(namespace.cast_unsigned());
    SeccompCondition::new(0, SeccompCmpArgLen::Qword, SeccompCmpOp::MaskedEq(flag), flag)
        .and_then(|condition| SeccompRule::new(vec![condition]))
        .map_err(|error| error.to_string())
}

/// A call with this type of file in its third argument.
fn makes_device(kind: libc::mode_t) -> Result<SeccompRule, String> {
    let mask = SeccompCmpOp::MaskedEq(libc::S_IFMT.into());
    SeccompCondition::new(2, SeccompCmpArgLen::Dword, mask, kind.into())
        .and_then(|condition| SeccompRule::new(vec![condition]))
        .map_err(|error| error.to_string())
}

fn apply(rules: BTreeMap<c_long, Vec<SeccompRule>>, error: libc::c_int) -> Result<(), String> {
    let target: TargetArch = ARCH.try_into().map_err(|_| format!("there is no filter for {ARCH}"))?;
    let (others, these) = (SeccompAction::Allow, SeccompAction::Errno(error.unsigned_abs()));
    let filter = SeccompFilter::new(rules, others, these, target).map_err(|error| error.to_string())?;
    let program = BpfProgram::try_from(filter).map_err(|error| error.to_string())?;
    apply_filter(&program).map_err(|error| error.to_string())
}
