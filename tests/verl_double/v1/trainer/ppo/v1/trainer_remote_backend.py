# SPDX-License-Identifier: Apache-2.0
"""What the V1 form is recognised by. Importing it is a mistake."""

raise AssertionError("the plug-in must not import a trainer to find out which there is")
